"""Stacks of matrices that stand where a class holds a parameter, such as its experts."""

from __future__ import annotations

from bp_convert.experts.stack import BPStack, Stack

__all__ = ["BPStack", "Stack"]
