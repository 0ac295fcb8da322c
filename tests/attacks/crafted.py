"""A model that is quickly made, for files that claim to hold its weights."""

from __future__ import annotations

from torch import nn


def small() -> nn.Module:
    """Make it."""
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Conv1d(4, 2, 1))
