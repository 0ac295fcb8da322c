"""A written file proven: a fresh process, in another folder, loads it and gives every bit back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from bp_convert.errors import VerificationError
from bp_convert.files.atomic import Prove
from bp_convert.files.reread import bits_of, compare, read_back
from bp_convert.proof.helper import give_back, take

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
            expected = bits_of(model)  # while the other process loads
            answer = self._answer()
            if answer is None:  # a process that died says nothing about the file
                read_back(model, path, trust=trust)(places)
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
