"""Frozen values that describe what to do and what was done. Nothing here imports torch."""
