"""Blocks tuned to what they put out in the source, without labels, judged on held-out examples."""

from __future__ import annotations

from bp_convert.reconstruction.blockwise import learnt_of, reconstruct
from bp_convert.reconstruction.foretelling import foretold

__all__ = ["foretold", "learnt_of", "reconstruct"]
