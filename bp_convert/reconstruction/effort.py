"""How many passes over the examples a model is worth, and whether that is done unasked.

What is done must not hang on how busy a machine is, so multiply-adds are counted, not seconds.
"""

from __future__ import annotations

from math import ceil

import torch

from bp_convert.calibration.work import FASTER
from bp_convert.values.plan import Plan
from bp_convert.values.reconstruction import Reconstruct
from bp_convert.values.settings import Settings

EPOCHS = 20  # at most, where nobody says how many
LEAST = 3  # fewer are not worth their time
BUDGET = 1e13  # multiply-adds: some ten minutes on one CPU core
PASSES = 3  # forward, and twice as much backward
ENOUGH = 16  # examples that judge, below which nothing is judged unasked


def asked_of(settings: Settings) -> Reconstruct:
    """Return what is asked, by default nothing in particular."""
    asked = settings.reconstruct
    return asked if isinstance(asked, Reconstruct) else Reconstruct()


def held_of(count: int, share: float) -> int:
    """Return how many of ``count`` examples judge."""
    return min(count - 1, max(1, int(share * count)))


def epochs_of(plan: Plan, examples: int, device: torch.device) -> tuple[int, str]:
    """Return how many epochs each block is tuned for, and why none are.

    Args:
        examples: for calibration.
        device: that the model is on.
    """
    settings = plan.settings
    if settings.reconstruct == "off":
        return 0, ""
    asked = asked_of(settings)
    if examples < 2:
        return 0, "one example cannot be learnt from and held out"
    if asked.epochs is not None:
        return asked.epochs, ""
    own = settings.reconstruct is None
    held = held_of(examples, asked.held_out)
    if own and held < ENOUGH:
        return 0, (
            f"{examples} calibration examples are too few to judge it by "
            f"({ceil(ENOUGH / asked.held_out)} are enough; --reconstruct does it all the same)"
        )
    macs = plan.params.after if plan.macs is None else plan.macs.after
    each = PASSES * max(1, macs) * (examples - held)
    possible = int(BUDGET * (1 if device.type == "cpu" else FASTER) / each)
    if own and possible < LEAST:
        return 0, "it would take long for a model of this size (--reconstruct does it)"
    return min(EPOCHS, max(LEAST, possible)), ""
