"""Layers that share factors: who they are, how one fit serves them all, and how they stay tied."""
