"""Examples to calibrate on and to evaluate with, from files, folders, loaders and tensors."""

from __future__ import annotations

from bp_convert.data.door import Data, examples_for, held_back
from bp_convert.data.examples import Examples
from bp_convert.data.load import from_loader, from_tensors, load_examples
from bp_convert.graph.example import adapt

__all__ = [
    "Data",
    "Examples",
    "adapt",
    "examples_for",
    "from_loader",
    "from_tensors",
    "held_back",
    "load_examples",
]
