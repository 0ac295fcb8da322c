"""Weights in few bits: grids, rounding onto them, and how they lie in files and in memory."""
