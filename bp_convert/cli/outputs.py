"""The files that a run will write: refused before any work, written after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bp_convert.errors import PlanError

if TYPE_CHECKING:
    from torch import nn

    from bp_convert.proof import Proof
    from bp_convert.values.report import Report


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
    from bp_convert.files.atomic import check_output
    from bp_convert.files.converted import OUTPUT_SUFFIXES
    from bp_convert.files.sidecar import plan_path
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


def write_reports(result: Report, paths: Sequence[Path], *, force: bool) -> list[Path]:
    """Write the report in the forms that the names ask for."""
    from bp_convert.files import write_text
    from bp_convert.render.documents import document

    return [write_text(path, document(result, path), force=force) for path in paths]


class Result:
    """The model file that a command will write: refused before the work, proven after it.

    Args:
        goal: where it goes.
        proof: a process that will load it.
        trust: what ``--trust`` names.
    """

    def __init__(self, goal: Path, proof: Proof, trust: Sequence[str] | None, force: bool) -> None:
        self.goal = goal
        self.proof = proof
        self.trust = tuple(trust or ())
        self.force = force

    def check(self, source: nn.Module, arch: str | None = None) -> None:
        """Refuse a model whose result could not be read back.

        Args:
            arch: how ``source`` is made, where the result will say so.

        Raises:
            CheckpointError: names what is at fault, and a way out.
        """
        from bp_convert.files import check_writable

        check_writable(source, self.goal, arch=arch, trust=self.trust)

    def write(
        self, model: nn.Module, arch: str | None = None, source: Path | None = None
    ) -> tuple[list[Path], list[str]]:
        """Write the model, and prove the file in a fresh process.

        Args:
            source: the file that the model was made from.

        Returns:
            The files written, and notes.

        Raises:
            CheckpointError: it cannot be written.
            VerificationError: it does not load, or not as it was; then nothing is left of it.
        """
        from bp_convert import pipeline
        from bp_convert.files import check_writable
        from bp_convert.storage import PLAN_ATTRIBUTE

        needed = check_writable(model, self.goal, arch=arch, trust=self.trust)
        script = (arch or "").partition("?")[0].rpartition(":")[0]
        if script.endswith(".py"):
            needed = (*needed, str(Path(script).resolve()))
        trusted = tuple(dict.fromkeys((*self.trust, *needed)))
        prove = self.proof.of(model, self.goal, trust=trusted, source=source)
        given: dict[str, Any] = {"force": self.force, "trust": self.trust, "prove": prove}
        if hasattr(model, PLAN_ATTRIBUTE):
            written = pipeline.save(model, self.goal, arch=arch, **given)
        else:
            written = [pipeline.save_dense(model, self.goal, **given)]
        words = [f"loading it takes trust={[*needed]}"] if needed else []
        return written, [*words, *self.proof.notes]


@contextmanager
def result_at(
    goal: Path, *, trust: Sequence[str] | None, force: bool, wanted: bool = True
) -> Iterator[Result | None]:
    """Start what will prove a result, beside the work; None where none is wanted."""
    if not wanted:
        yield None
        return
    from bp_convert.proof import Proof

    with Proof() as proof:
        yield Result(goal, proof, trust, force)
