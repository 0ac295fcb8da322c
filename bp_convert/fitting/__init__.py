"""Factors fitted to what the layers see, layer after layer, without labels or gradients."""

from __future__ import annotations

from bp_convert.fitting.rounding import round_stored
from bp_convert.fitting.sequence import fit_to_data, foretold_examples

__all__ = ["fit_to_data", "foretold_examples", "round_stored"]
