"""How blocks are tuned to their source's outputs, and what came of it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from bp_convert.values.base import Number, Value, one_or_many


class Reconstruct(Value):
    """What is asked of the tuning of blocks.

    Attributes:
        epochs: passes over the examples for each block, at most; None takes as many as its
            multiply-adds allow.
        lr: rate of Adam; None tries some on the first epochs.
        held_out: share of the calibration examples that judge and are not learnt.
        blocks: names of the modules that are tuned one after the other; empty finds them.
        end_to_end: passes over the examples in which all blocks are tuned together to the model's
            outputs, after each was tuned to its own.
    """

    epochs: Annotated[int, Field(ge=1)] | None = None
    lr: Annotated[float, Field(gt=0)] | None = None
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.125
    blocks: tuple[str, ...] = ()
    end_to_end: Annotated[int, Field(ge=0)] = 0

    _lists = field_validator("blocks", mode="before")(one_or_many)


class BlockResult(Value):
    """What became of one block, or of layers that were tuned together.

    Attributes:
        name: dotted name of the block, or of the first layer and the last.
        before, after: relative error of its output on what is held out; None where it was not run.
        kept: whether the tuned weights stand; else it has those that it had.
        lr: rate that was taken.
        epochs: that were run.
        seconds: that it took.
        reason: why nothing was kept.
    """

    name: str
    before: Number | None = None
    after: Number | None = None
    kept: bool = False
    lr: float | None = None
    epochs: int = 0
    seconds: float = 0.0
    reason: str = ""


class Reconstructed(Value):
    """What the tuning of blocks did.

    Attributes:
        blocks: one entry for each, in the order of their calls.
        before, after: relative error of the model's outputs on what is held out; None where
            nothing was run.
        learnt: examples that were learnt from.
        held: examples that judged.
        resumed: blocks that an earlier run had done.
        seconds: that all of it took.
        reason: why nothing was done, or nothing kept.
    """

    blocks: tuple[BlockResult, ...] = ()
    before: Number | None = None
    after: Number | None = None
    learnt: int = 0
    held: int = 0
    resumed: int = 0
    seconds: float = 0.0
    reason: str = ""

    @property
    def kept(self) -> bool:
        """Whether any block was made better."""
        return any(one.kept for one in self.blocks)
