"""The files that a run writes: refused before any work, written after it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bp_convert.errors import PlanError
from bp_convert.files.atomic import (
    OUTPUT_SUFFIXES,
    check_folder,
    check_output,
    is_folder,
    plan_path,
    write_text,
)
from bp_convert.files.sniff import file_kind
from bp_convert.pages.documents import document, form_of

if TYPE_CHECKING:
    from bp_convert.pages.documents import Result


@dataclass(frozen=True)
class Outputs:
    """Where the results of a run go; what is not named is not written.

    Attributes:
        model: the converted model.
        plan: as JSON.
        training: what training did, as JSON.
        reports: the endings say in which form.
        force: replace existing files.
        unconverted: train and write the model also where nothing was converted.
        checkpoints: where training keeps its state.
        resume: go on from the newest state there.
        download: let torchvision fetch a data set that is not there.
        command: that was typed, for reports.
    """

    model: Path | None = None
    plan: Path | None = None
    training: Path | None = None
    reports: tuple[Path, ...] = ()
    force: bool = False
    unconverted: bool = False
    checkpoints: Path | None = None
    resume: bool = False
    download: bool = False
    command: str = ""

    def check(self) -> None:
        """Refuse, before any work, what could not be written after it.

        Raises:
            CheckpointError: a file exists, has another ending, or its folder cannot be written.
            PlanError: a report of an unknown form, or two results under one name.
        """
        for path in self.reports:
            form_of(path)
        wanted = [*self.reports, *filter(None, [self.plan, self.training])]
        if self.model is not None:
            if is_folder(self.model):
                check_folder(self.model, force=self.force)
            else:
                check_output(self.model, force=self.force, suffixes=OUTPUT_SUFFIXES)
            beside = self.model.suffix == ".safetensors"
            wanted += [plan_path(self.model)] if beside else []
        real = [check_output(path, force=self.force) for path in wanted]
        if self.model is not None:
            wanted.append(self.model)
            real.append(Path(os.path.realpath(self.model)))
        for path, place in zip(wanted, real, strict=True):
            if real.count(place) > 1:
                raise PlanError(
                    where=str(path),
                    found="two results under this name",
                    allowed="a name of its own for each result",
                    fix="give another name to one of them",
                )


def check_model(path: Path) -> None:
    """Refuse, without torch, a file that is not there or that holds no model.

    Raises:
        CheckpointError: says what it is.
    """
    if not path.is_dir():
        file_kind(path)


def is_architecture(text: str) -> bool:
    """Tell one of the forms of ``--arch`` from a path."""
    return ":" in text and not Path(text).exists()


def write_reports(result: Result, outputs: Outputs) -> list[Path]:
    """Write a result in the forms that the names ask for."""
    return [
        write_text(path, document(result, path, outputs.command), force=outputs.force)
        for path in outputs.reports
    ]
