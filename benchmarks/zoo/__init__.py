"""Architectures with random weights, from torchvision, timm, transformers and our own hand."""
