"""Models larger than memory: planned by shapes, converted layer by layer, from disk to disk."""
