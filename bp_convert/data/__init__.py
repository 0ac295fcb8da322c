"""Examples to calibrate on, to train on and to evaluate with, of whatever holds data."""

from __future__ import annotations

from bp_convert.data.examples import Examples
from bp_convert.data.factory import Data
from bp_convert.data.share import Share, from_tensors
from bp_convert.data.split import Split, Uses, examples_for, split_for

__all__ = [
    "Data",
    "Examples",
    "Share",
    "Split",
    "Uses",
    "examples_for",
    "from_tensors",
    "split_for",
]
