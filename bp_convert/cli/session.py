"""What every command needs around its work: progress, errors in four parts, exit codes."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bp_convert.errors import BpConvertError, VerificationError
from bp_convert.faults import Fault, Trail, of_the_machine, written
from bp_convert.values.progress import Progress, bar

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bp_convert.values.exported import Export
    from bp_convert.values.report import Report
    from bp_convert.values.study import Probe, Sweep

TRACEBACK = "BP_CONVERT_TRACEBACK"  # an environment variable: show unforeseen faults whole
DONE, FAILED, USAGE, NOTHING, UNVERIFIED = 0, 1, 2, 3, 4


@contextmanager
def errors_shown() -> Iterator[Trail]:
    """Print this package's errors on stderr without a traceback, and exit with their code.

    Yields what remembers the stage, for a fault that nobody foresaw.
    """
    trail = Trail()
    try:
        yield trail
    except BpConvertError as problem:
        show_error(problem)
        raise SystemExit(UNVERIFIED if isinstance(problem, VerificationError) else FAILED) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # whoever read the output has seen enough
        raise
    except Exception as problem:
        if os.environ.get(TRACEBACK):
            raise
        show_error(of_the_machine(problem) or _unforeseen(trail.looked_into(problem)))
        raise SystemExit(FAILED) from None


def _unforeseen(fault: Fault) -> BpConvertError:
    """Describe a fault of this program, of the model's own code, or of the machine; write what
    helps to mend it into a file."""
    path = written(fault.report(["bp-convert", *sys.argv[1:]]))
    attach = "please report it" if path is None else f"please report it, and attach {path}"
    return BpConvertError(
        where=fault.where,
        found=f"{fault.words} ({fault.place})",
        allowed="only faults that bp-convert foresees",
        fix=f"{attach}; {TRACEBACK}=1 shows the whole way there",
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
def progress_shown(trail: Trail, *, quiet: bool, left: bool = False) -> Iterator[Progress]:
    """Yield a callback that draws a bar on stderr; nothing is drawn where nobody looks.

    Args:
        trail: remembers what was told last.
        left: show the time that is left, too.
    """
    if quiet or not sys.stderr.isatty():
        yield trail.told(lambda words, done, total: None)
        return
    with bar(left=left) as progress:
        yield trail.told(progress)


def show(what: RenderableType) -> None:
    """Print on stdout, in 80 columns where that is no terminal."""
    from rich.console import Console

    from bp_convert.render.terminal import WIDTH

    Console(width=None if sys.stdout.isatty() else WIDTH).print(what)


def print_result(
    result: Report | Probe | Sweep | Export,
    *,
    json_only: bool,
    quiet: bool,
    verbose: bool = False,
    files: Iterable[object] = (),
) -> None:
    """Print a result as it was asked for.

    Args:
        verbose: one row a layer.
        files: those written.
    """
    if json_only:
        from bp_convert.values.base import as_json

        print(as_json(result))
        return
    from bp_convert.pages import documents

    if quiet:
        print(documents.verdict(result))
        return
    show(documents.drawn(result, every=verbose))
    show_files(files)


def typed() -> str:
    """Return the command as it was typed."""
    return shlex.join(["bp-convert", *sys.argv[1:]])


def show_files(written: Iterable[object]) -> None:
    """Say which files were written."""
    for path in written:
        print(f"wrote {path}")
