"""What a plan says of blocks before any is tuned."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from bp_convert.graph.example import device_of
from bp_convert.reconstruction.block_finding import blocks_of
from bp_convert.reconstruction.effort import asked_of, epochs_of
from bp_convert.values.plan import Plan


def foretold(model: nn.Module, plan: Plan, examples: int) -> Sequence[str]:
    """Return a line on what will be tuned, or none.

    Raises:
        PlanError: the model has no block of a name that was given.
    """
    blocks = blocks_of(model, asked_of(plan.settings).blocks)
    epochs, _ = epochs_of(plan, examples, device_of(model))
    if not epochs or not plan.converted:
        return ()
    what = "groups of layers"
    if blocks:
        more = f" and {len(blocks) - 1} more blocks" if len(blocks) > 1 else ""
        what = f"{blocks[0]}{more}"
    return (f"{what}: tuned to the source's outputs, up to {epochs} epochs (--no-reconstruct)",)
