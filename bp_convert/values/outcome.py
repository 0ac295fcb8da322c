"""What the jobs of a recipe would cost, and what became of them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from bp_convert.values.base import Value
from bp_convert.values.plan import Totals
from bp_convert.values.recipe import Figures
from bp_convert.values.report import Score
from bp_convert.values.training import Trained

State = Literal["waiting", "running", "done", "failed"]


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


class Outcome(Value):
    """One job, done or not.

    Attributes:
        name: of the job.
        state: done, failed, or not run yet.
        identity: hash of what the job depends on.
        keys: what distinguishes it: alpha, rank, target, method, counterpart, init, seed.
        model: words for the model it starts from.
        params: parameters of the full model and of the job's.
        macs: multiply-adds of one example; None where not counted.
        bytes: size of parameters and buffers.
        error: estimated relative error, where a target was met.
        converted: the score before any training of the converted model.
        score: the score in the end; ``before`` is the full model's.
        full: what training the full model gave, where the recipe trains it.
        trained: what training the converted model gave.
        paper: figures to compare with.
        notes: remarks.
        seconds: that the job took.
        problem: why it failed.
        folder: where its files are, relative to the summary.
    """

    # JSON has no infinity; as text it comes back as the same number.
    model_config = ConfigDict(ser_json_inf_nan="strings")

    name: str
    state: State = "done"
    identity: str = ""
    keys: dict[str, Any] = Field(default_factory=dict)
    model: str = ""
    params: Totals | None = None
    macs: Totals | None = None
    bytes: Totals | None = None
    error: float | None = None
    converted: Score | None = None
    score: Score | None = None
    full: Trained | None = None
    trained: Trained | None = None
    paper: Figures | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    problem: str = ""
    folder: str = ""


class Summary(Value):
    """All jobs of a recipe.

    Attributes:
        format: version of this form.
        name: of the recipe.
        about: what it is for.
        recipe: its file.
        jobs: in the recipe's order, those that are not done too.
        versions: of what made the results.
        machine: words for where they were made.
    """

    model_config = ConfigDict(ser_json_inf_nan="strings")

    format: Literal[1] = 1
    name: str
    about: str = ""
    recipe: str = ""
    jobs: tuple[Outcome, ...]
    versions: dict[str, str] = Field(default_factory=dict)
    machine: str = ""

    def count(self, state: State) -> int:
        """Return how many jobs are in a state."""
        return sum(one.state == state for one in self.jobs)
