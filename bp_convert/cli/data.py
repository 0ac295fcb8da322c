"""Calibration and evaluation data of a command, kept apart where they come from one source."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from bp_convert.data import Examples
    from bp_convert.data.rows import Part
    from bp_convert.files import Loaded
    from bp_convert.values.settings import Settings
    from bp_convert.values.training import Training

SCORED = 2000  # examples that are scored at most


class Data:
    """What ``--calibrate`` and ``--evaluate`` name.

    Args:
        count: examples to calibrate on.
        tokenizer: folder of a tokenizer, for text.
        settings: the request, which describes the model's input.
        training: what ``--finetune`` asks for, which may take the same sources.
    """

    def __init__(
        self,
        calibrate: str | None,
        evaluate: str | None,
        *,
        count: int,
        tokenizer: Path | None,
        settings: Settings,
        training: Training | None = None,
    ) -> None:
        self.calibrate = calibrate
        self.evaluate = evaluate
        self.count = count
        self.tokenizer = tokenizer
        self.settings = settings
        self.training = training
        self.fitted: Examples | None = None
        self.scored: Examples | None = None

    def calibration(self, model: nn.Module) -> Examples | None:
        """Load what is calibrated on; None where none was named.

        Raises:
            DataError: it cannot be read or does not fit the model.
        """
        if self.calibrate is None:
            return None
        self.fitted = self._load(model, self.calibrate, "calibrate", self.count, 0)
        return self.fitted

    def evaluation(self, model: nn.Module) -> Examples | None:
        """Load what is scored; None where none was named.

        Raises:
            DataError: it cannot be read, does not fit the model, all of it was calibrated on, or
                it would be learnt.
        """
        if self.evaluate is None:
            return None
        from bp_convert.data.door import same_source

        same = self.calibrate is not None and same_source(self.calibrate, self.evaluate)
        taken = self.fitted.count if same and self.fitted is not None else 0
        self.scored = self._load(model, self.evaluate, "evaluate", SCORED, taken)
        if self.training is not None:
            self.apart()  # now, not when the model has been converted
        return self.scored

    def apart(self) -> dict[str, Any]:
        """Return which rows training has to tell apart, as arguments of ``finetune``.

        Raises:
            DataError: what is scored would be learnt.
        """
        from bp_convert.data.door import rows_within
        from bp_convert.errors import DataError

        assert self.training is not None
        assert self.training.data is not None
        fitted = rows_within(self.training.data, self.calibrate, self.fitted)
        scored = rows_within(self.training.data, self.evaluate, self.scored)
        if scored is None:
            raise DataError(
                where=f"data {self.evaluate}",
                found="the data that is learnt from, which cannot be kept apart from it",
                allowed="other examples to score on",
                fix="name another source to evaluate on",
            )
        return {"fitted": fitted or (), "scored": scored}

    def _load(
        self, model: nn.Module, source: str, part: Part, count: int, held_out: int
    ) -> Examples:
        from bp_convert import pipeline
        from bp_convert.data.door import spare_of

        return pipeline.examples_for(
            model,
            source,
            self.settings,
            part=part,
            count=count,
            held_out=held_out,
            spare=spare_of(self.training, source, self.evaluate),
            tokenizer=self.tokenizer,
        )


def open_with_data(
    model: Path,
    *,
    arch: str | None,
    trust: list[str] | None,
    allow_missing: bool,
    settings: Settings,
    calibrate: str | None,
    evaluate: str | None = None,
    count: int,
    tokenizer: Path | None,
    training: Training | None = None,
) -> tuple[Loaded, Data]:
    """Open a model file, and name the data beside it; none of that is read yet.

    Raises:
        CheckpointError: the file is no model, or is not trusted.
    """
    from bp_convert import pipeline
    from bp_convert.data.tokenizers import tokenizer_in

    loaded = pipeline.open_model(model, arch=arch, trust=trust or (), allow_missing=allow_missing)
    folder = tokenizer or tokenizer_in(model, arch)
    return loaded, Data(
        calibrate,
        evaluate,
        count=count,
        tokenizer=folder,
        settings=settings,
        training=training,
    )
