"""Data of a command, kept apart where uses share a source."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from bp_convert.data import Examples, Split
    from bp_convert.files import Loaded
    from bp_convert.values.settings import Settings
    from bp_convert.values.tensors import TensorSpec
    from bp_convert.values.training import Training


@dataclass(frozen=True)
class Data:
    """What ``--calibrate``, ``--evaluate`` and ``--finetune`` name.

    Attributes:
        model: that they are for.
        settings: the request, which describes the model's input.
        calibrate, evaluate: sources.
        count: examples to calibrate on.
        tokenizer: folder of a tokenizer, for text.
        training: what ``--finetune`` asks for, which may take the same sources.
        download: let torchvision fetch what is trained on.
        inputs: what the converted model takes, where a plan says so.
    """

    model: nn.Module
    settings: Settings
    calibrate: str | None
    evaluate: str | None
    count: int
    tokenizer: Path | None
    training: Training | None
    download: bool
    inputs: tuple[TensorSpec, ...]

    @cached_property
    def split(self) -> Split:
        """What each use gets.

        Raises:
            DataError: a source cannot be read or does not fit the model, or uses cannot be kept
                apart.
        """
        from bp_convert.data import Uses, split_for

        uses = Uses(self.calibrate, self.count, evaluate=self.evaluate)
        return split_for(
            self.model,
            uses.with_training(self.training),
            self.settings,
            inputs=self.inputs,
            tokenizer=self.tokenizer,
            download=self.download,
        )

    @property
    def calibration(self) -> Examples | None:
        """What is calibrated on; None where none was named."""
        return None if self.split.calibrate is None else self.split.calibrate.examples

    @property
    def evaluation(self) -> Examples | None:
        """What is scored; None where none was named."""
        return None if self.split.evaluate is None else self.split.evaluate.examples


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
    download: bool = False,
    inputs: tuple[TensorSpec, ...] = (),
    device: str | None = None,
) -> tuple[Loaded, Data]:
    """Open a model file, and name the data beside it; none of that is read yet.

    Raises:
        CheckpointError: the file is no model, or is not trusted.
    """
    from bp_convert import pipeline
    from bp_convert.data.text_lines import tokenizer_in

    loaded = pipeline.open_model(model, arch=arch, trust=trust or (), allow_missing=allow_missing)
    found = tokenizer or tokenizer_in(model, arch)
    source = pipeline.moved(loaded.model, device)
    return loaded, Data(
        source, settings, calibrate, evaluate, count, found, training, download, inputs
    )
