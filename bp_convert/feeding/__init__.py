"""Batches in the order that training learns them in, augmented where that is asked."""
