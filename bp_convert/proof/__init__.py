"""A model file or folder written and proven: a fresh process, in another folder, loads it and gives
every bit back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from bp_convert.errors import VerificationError
from bp_convert.files.atomic import Prove
from bp_convert.files.folder import bits_in_folder, folder_read_back
from bp_convert.files.reread import bits_of, compare, read_back
from bp_convert.proof.helper import give_back, take
from bp_convert.storage import check_savable, is_marked, save, save_dense
from bp_convert.values.architecture import Architecture

TIMEOUT = 1800  # seconds for loading one file


class Proof:
    """Holds a process that is ready to load a file, for the length of a ``with`` block.

    It is started before the work, so that it has imported torch when the file is there.
    """

    def __init__(self, timeout: float = TIMEOUT) -> None:
        self.timeout = timeout
        self.notes: list[str] = []
        self._helper = take()

    def __enter__(self) -> Proof:
        return self

    def __exit__(self, *details: object) -> None:
        if self._helper is not None:
            give_back(self._helper)

    def of(
        self,
        model: nn.Module,
        path: Path,
        *,
        trust: Sequence[str] = (),
        source: Path | None = None,
    ) -> Prove:
        """Return what proves a file of ``model`` before it takes its name ``path``.

        Args:
            trust: what loading has to trust.
            source: the file that holds the source model, for a result that holds neither that
                nor how it is made.
        """

        def prove(places: Sequence[Path]) -> None:
            task = {
                "places": [str(one.resolve()) for one in places],
                "trust": [
                    str(Path(one).resolve()) if one.endswith(".py") else one for one in trust
                ],
                "source": None if source is None else str(source.resolve()),
            }
            if self._helper is not None:
                self._helper.ask(task)
            bits = bits_in_folder if places[0].is_dir() else bits_of
            expected = bits(model)  # while the other process loads
            answer = self._answer()
            if answer is None:  # a process that died says nothing about the file
                back = folder_read_back(model, path) if places[0].is_dir() else None
                (back or read_back(model, path, trust=trust))(places)
                return
            if "error" in answer:
                where, found, allowed, fix = answer["error"]
                raise VerificationError(
                    where=str(path),
                    found="a fresh process cannot load the file as it was written: "
                    f"{where}: {found}; it was removed",
                    allowed=allowed,
                    fix=fix,
                )
            compare(path, expected, answer["bits"])

        return prove

    def _answer(self) -> dict[str, Any] | None:
        reason = "it cannot be started"
        if self._helper is not None:
            try:
                return self._helper.answer(self.timeout)
            except ProcessLookupError as problem:
                reason = str(problem)
        self.notes.append(
            f"the file was read back in this process alone; not in a fresh one, for {reason}"
        )
        return None


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
        needed = check_savable(model, self.goal, arch=arch, trust=self.trust)
        script = Architecture.parse(arch or "").script
        if script is not None:
            needed = (*needed, str(script.resolve()))
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
