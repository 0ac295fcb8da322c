"""How work tells of its progress: to a function or whoever looks on, as a bar, and to the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bp_convert.values.outcome import Outcome

Progress = Callable[[str, int, int], None]  # words, steps done, and their number
_log = logging.getLogger("bp_convert")
_log.addHandler(logging.NullHandler())


@contextmanager
def told(progress: Progress | bool | None) -> Iterator[Progress]:
    """Yield what work calls with its progress; each new stage stands in the log, too.

    Args:
        progress: a function that is called with words, steps done and their number; True draws a
            bar on stderr.
    """
    last = ""
    with bar() if progress is True else nullcontext(progress or None) as shown:

        def tell(words: str, done: int, total: int) -> None:
            nonlocal last
            if words != last:
                last = words
                _log.info("%s (%d of %d)", words, done, total)
            if shown is not None:
                shown(words, done, total)

        yield tell


@contextmanager
def bar(*, left: bool = False) -> Iterator[Progress]:
    """Yield what draws a bar on stderr, which is gone afterwards.

    Args:
        left: show the time that is left, too.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        *([TextColumn("left"), TimeRemainingColumn()] if left else []),
    )
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("loading", total=None)

        def update(words: str, done: int, total: int) -> None:
            bars.update(task, description=words[-40:].ljust(40), completed=done, total=total)

        yield update


def unheard(words: str, done: int, total: int) -> None:
    """Tell nobody."""


class Onlooker:
    """Is told what becomes of each job of a recipe; this one hears nothing."""

    def started(self, name: str) -> None:
        """Hear that a job runs."""

    def progressed(self, name: str, words: str, done: int, total: int) -> None:
        """Hear how far it is."""

    def ended(self, outcome: Outcome) -> None:
        """Hear what became of it."""
