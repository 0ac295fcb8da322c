"""What every command needs around its work: progress, errors in four parts, exit codes."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bp_convert.errors import BpConvertError, VerificationError

if TYPE_CHECKING:
    from rich.console import RenderableType

TRACEBACK = "BP_CONVERT_TRACEBACK"  # an environment variable: show unforeseen faults whole
DONE, FAILED, USAGE, NOTHING, UNVERIFIED = 0, 1, 2, 3, 4

Progress = Callable[[str, int, int], None]


@contextmanager
def errors_shown() -> Iterator[None]:
    """Print this package's errors on stderr without a traceback, and exit with their code."""
    try:
        yield
    except BpConvertError as problem:
        show_error(problem)
        raise SystemExit(UNVERIFIED if isinstance(problem, VerificationError) else FAILED) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # whoever read the output has seen enough
        raise
    except Exception as fault:
        if os.environ.get(TRACEBACK):
            raise
        show_error(_unforeseen(fault))
        raise SystemExit(FAILED) from None


def _unforeseen(fault: Exception) -> BpConvertError:
    """Describe a fault of this program, of the model's own code, or of the machine."""
    last = traceback.extract_tb(fault.__traceback__)[-1]
    words = str(fault).strip().splitlines()
    return BpConvertError(
        where=f"{Path(last.filename).name}, line {last.lineno}, in {last.name}",
        found=f"{type(fault).__name__}: {words[0][:300] if words else 'no more words'}",
        allowed="only faults that bp-convert foresees",
        fix=f"set {TRACEBACK}=1 to see the whole way there; if the fault is bp-convert's own, "
        "please report it",
    )


def show_error(problem: BpConvertError) -> None:
    """Print where, what was found, what is allowed, and what to do; fold lines for people only."""
    if not sys.stderr.isatty():
        print(f"bp-convert: {problem}", file=sys.stderr)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(stderr=True)
    console.print(Text(f"bp-convert: {problem.where}", style="bold red"))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2), pad_edge=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("found", Text(problem.found))
    table.add_row("allowed", Text(problem.allowed))
    table.add_row("to do", Text(problem.fix, style="bold"))
    console.print(table)


@contextmanager
def progress_shown(*, quiet: bool, left: bool = False) -> Iterator[Progress]:
    """Yield a callback that draws a bar on stderr; nothing is drawn where nobody looks.

    Args:
        left: show the time that is left, too.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda words, done, total: None
        return
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


def show(what: RenderableType) -> None:
    """Print on stdout, in 80 columns where that is no terminal."""
    from rich.console import Console

    from bp_convert.render.terminal import WIDTH

    Console(width=None if sys.stdout.isatty() else WIDTH).print(what)


def show_files(written: Iterable[object]) -> None:
    """Say which files were written."""
    for path in written:
        print(f"wrote {path}")
