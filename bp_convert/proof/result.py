"""A model file written and proven."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from bp_convert.files.arch import place_of
from bp_convert.files.writable import check_writable
from bp_convert.proof import Proof
from bp_convert.storage import is_marked, save, save_dense


@dataclass(frozen=True)
class ResultFile:
    """The model file that will be written: refused before the work, proven after it.

    Attributes:
        goal: where it goes.
        proof: a process that will load it.
        trust: packages and files whose code may run.
        force: an older file may be replaced.
    """

    goal: Path
    proof: Proof
    trust: tuple[str, ...]
    force: bool

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
        needed = check_writable(model, self.goal, arch=arch, trust=self.trust)
        place = None if arch is None else place_of(arch)
        if place is not None and place.suffix == ".py":
            needed = (*needed, str(place.resolve()))
        trusted = tuple(dict.fromkeys((*self.trust, *needed)))
        prove = self.proof.of(model, self.goal, trust=trusted, source=source)
        given: dict[str, Any] = {"force": self.force, "trust": self.trust, "prove": prove}
        if is_marked(model):
            written = save(model, self.goal, arch=arch, **given)
        else:
            written = [save_dense(model, self.goal, **given)]
        words = [f"loading it takes trust={[*needed]}"] if needed else []
        return written, [*words, *self.proof.notes]


@contextmanager
def result_at(
    goal: Path | None, *, trust: Sequence[str] | None, force: bool
) -> Iterator[ResultFile | None]:
    """Start what will prove a result, beside the work; None where there is no ``goal``."""
    if goal is None:
        yield None
        return
    with Proof() as proof:
        yield ResultFile(goal, proof, tuple(trust or ()), force)
