"""Examples to calibrate on, to train on and to evaluate with, of whatever holds data."""

from __future__ import annotations

from bp_convert.data.examples import Examples
from bp_convert.data.factory import Data
from bp_convert.data.loading import examples_for, from_tensors, load_examples
from bp_convert.data.share import Share
from bp_convert.data.split import Split, Uses, split_for
from bp_convert.graph.example import adapt

__all__ = [
    "Data",
    "Examples",
    "Share",
    "Split",
    "Uses",
    "adapt",
    "examples_for",
    "from_tensors",
    "load_examples",
    "split_for",
]
