"""``--finetune`` of the convert command: the result trained by its source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bp_convert.errors import TrainingError
from bp_convert.values.progress import Progress

if TYPE_CHECKING:
    from torch import nn

    from bp_convert.cli.data import Data
    from bp_convert.values.report import Report
    from bp_convert.values.training import Training


@dataclass(frozen=True)
class Trainer:
    """What ``--finetune`` asked for."""

    settings: Training
    beside: dict[str, Any]

    def run(
        self,
        small: nn.Module,
        source: nn.Module,
        report: Report,
        data: Data,
        metric: str | None,
        progress: Progress,
    ) -> tuple[nn.Module, Report]:
        """Train a converted model; return it, and the report with what was done.

        Args:
            data: what was calibrated on and scored.
        """
        from bp_convert.evaluation import evaluate
        from bp_convert.reporting import trained
        from bp_convert.training import finetune

        model, done = finetune(
            small,
            teacher=source,
            settings=self.settings,
            split=data.split,
            progress=progress,
            **{key: value for key, value in self.beside.items() if key != "download"},
        )
        held = data.evaluation
        scores = evaluate(source, [model], held, metric) if held is not None else []
        return model, trained(report, done, scores)


def trainer_from(words: list[str] | None, calibrate: str | None) -> Trainer | None:
    """Read ``--finetune``; the data of ``--calibrate`` is trained on where it names none.

    Raises:
        TrainingError: a setting is not valid, or there is no data.
    """
    if not words:
        return None
    from bp_convert.cli.reading import training_from

    settings, beside = training_from(words, "--finetune")
    if settings.data is None:
        if calibrate is None:
            raise TrainingError(
                where="--finetune",
                found="no data",
                allowed="--finetune data=SOURCE, or --calibrate SOURCE",
                fix="name the data to train on, such as --finetune data=FashionMNIST",
            )
        settings = settings.model_copy(update={"data": calibrate})
    return Trainer(settings, beside)
