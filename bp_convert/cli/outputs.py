"""The files that a run will write: refused before any work, written after it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bp_convert.errors import PlanError

if TYPE_CHECKING:
    from bp_convert.render.documents import Result


def check_model(path: Path) -> None:
    """Refuse, without torch, a file that is not there or that holds no model.

    Raises:
        CheckpointError: says what it is.
    """
    from bp_convert.files.sniff import file_kind

    if not path.is_dir():
        file_kind(path)


def check_outputs(
    target: Path | None, *, reports: Sequence[Path], plan_out: Path | None, force: bool
) -> None:
    """Refuse, before any work, what could not be written after it.

    Args:
        target: where the converted model goes; None where none is written.

    Raises:
        CheckpointError: a file exists, has another ending, or its folder cannot be written.
        PlanError: a report of an unknown form, or two results under one name.
    """
    from bp_convert.files.atomic import OUTPUT_SUFFIXES, check_output, plan_path
    from bp_convert.render.documents import form_of

    wanted = [*reports, *filter(None, [plan_out])]
    for path in reports:
        form_of(path)
    if target is not None:
        check_output(target, force=force, suffixes=OUTPUT_SUFFIXES)
        wanted += [target, *([plan_path(target)] if target.suffix == ".safetensors" else [])]
    real = [check_output(path, force=force) for path in wanted]
    for path, place in zip(wanted, real, strict=True):
        if real.count(place) > 1:
            raise PlanError(
                where=str(path),
                found="two results under this name",
                allowed="a name of its own for each result",
                fix="give another name to one of them",
            )


def write_reports(result: Result, paths: Sequence[Path], *, force: bool) -> list[Path]:
    """Write a result in the forms that the names ask for."""
    from bp_convert.files import write_text
    from bp_convert.render.documents import document

    command = shlex.join(["bp-convert", *sys.argv[1:]])
    return [write_text(path, document(result, path, command), force=force) for path in paths]
