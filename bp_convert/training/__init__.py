"""Converted models trained: by their source, by labels, on one process or several."""

from __future__ import annotations

from bp_convert.training.engine import leave
from bp_convert.training.finetuning import finetune, settings_for

__all__ = ["finetune", "leave", "settings_for"]
