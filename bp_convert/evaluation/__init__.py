"""How well converted models do next to their source, on the same examples."""

from __future__ import annotations

from bp_convert.evaluation.scorer import Scorer

__all__ = ["Scorer"]
