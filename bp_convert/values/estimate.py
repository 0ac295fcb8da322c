"""What a job would do, and what it would cost."""

from __future__ import annotations

from bp_convert.values.base import Value
from bp_convert.values.plan import Totals


class Estimate(Value):
    """One job, planned and not run.

    Attributes:
        name: of the job.
        what: how the model is made, in words.
        params: parameters of the full model and of the job's.
        macs: multiply-adds of one example; None where not counted.
        converted: layers that are exchanged, and of how many.
        steps: of training, the full model's in front; None where the data's size is not known.
        training_macs: multiply-adds of all training; None where not known.
        seconds: that these would take at the speed that this machine multiplies large matrices;
            a lower limit.
        notes: remarks, such as what could not be looked up.
        problem: why the job cannot run; empty where it can.
    """

    name: str
    what: str = ""
    params: Totals | None = None
    macs: Totals | None = None
    converted: tuple[int, int] = (0, 0)
    steps: tuple[int | None, int | None] = (0, 0)
    training_macs: float | None = 0.0
    seconds: float | None = None
    notes: tuple[str, ...] = ()
    problem: str = ""
