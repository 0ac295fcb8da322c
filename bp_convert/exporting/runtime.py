"""What a runtime is: how a file is written for it and run in it."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from bp_convert.errors import ExportError
from bp_convert.exporting.program import Program
from bp_convert.values.literals import Form, Goal

Run = Callable[[Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Piece:
    """One layer in one form, to be timed alone.

    Attributes:
        layer: that computes in the form already.
        inputs: it is called with, by batch size; the first axis may have any length.
    """

    layer: nn.Module
    inputs: tuple[Tensor, ...]


class Runtime:
    """One runtime: writes a traced model for it, and runs what was written.

    Everything of a runtime's packages is imported when it is first needed.
    """

    goal: ClassVar[Goal]
    suffix: ClassVar[str]
    extra: ClassVar[str] = ""  # of this package, that installs what it needs
    writes_with: ClassVar[tuple[str, ...]] = ()  # modules
    runs_with: ClassVar[tuple[str, ...]] = ()
    package: ClassVar[str] = ""  # whose version is told
    forms: ClassVar[tuple[Form, Form]]  # on the factors, and as fast as the dense layer
    lays_out: ClassVar[bool] = True  # factors are laid out before tracing
    most: ClassVar[int | None] = None  # examples in a batch, where there is a limit

    def write(self, program: Program, folder: Path, name: str) -> list[Path]:
        """Write a traced model into a folder; return its files, that which is opened first.

        Raises:
            ExportError: an operator that the target has no form for.
        """
        raise NotImplementedError

    def opened(self, file: Path, threads: int) -> Run:
        """Return what runs a file on the tensors of the inputs, in their order."""
        raise NotImplementedError

    def opened_pieces(self, pieces: Sequence[Piece], folder: Path, threads: int) -> list[Run]:
        """Return what runs each piece alone."""
        raise NotImplementedError

    def special(self, layer: nn.Module) -> Callable[..., Any] | None:
        """Return what computes a layer by an operator of the target's own; None for most."""
        return None

    def check_installed(self) -> None:
        """Refuse where a package is missing that writes the file.

        Raises:
            ExportError: names it, and the line that installs it.
        """
        missing = [one for one in self.writes_with if not _there(one)]
        if missing:
            raise ExportError(
                where=f"--to {self.goal}",
                found=f"{' and '.join(missing)} not installed",
                allowed=f"the packages of the extra {self.extra!r}",
                fix=self.install,
            )

    @property
    def install(self) -> str:
        """The line that installs what it needs."""
        return f"pip install 'bp-convert[{self.extra}]'"

    @property
    def can_run(self) -> bool:
        """Whether the runtime is installed here."""
        return all(map(_there, self.runs_with))

    @property
    def runtime(self) -> str:
        """The runtime with its version."""
        return f"{self.package} {importlib.metadata.version(self.package)}"


def _there(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True
