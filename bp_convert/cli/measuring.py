"""The command that measures how fast layers run on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from bp_convert.cli import flags as o
from bp_convert.cli.session import errors_shown, progress_shown
from bp_convert.values.literals import DType


def tune(
    device: Annotated[
        str, o.option(None, "--device NAME", "What layers run on: cpu, cuda or cuda:1.")
    ] = "cpu",
    threads: Annotated[
        int | None, o.option(None, "--threads N", "Of torch. Default: as it has.", min=1)
    ] = None,
    dtype: Annotated[DType, o.option(None, "--dtype TYPE", "Of the weights.")] = "float32",
    quiet: o.Quiet = False,
) -> None:
    """Measure how fast layers run here, dense and bilinear: later plans go by it.

    Takes at most two minutes, best on a quiet machine. What is measured is kept in the cache
    folder, by device, threads, dtype and torch's version.
    """
    with errors_shown() as trail:
        from bp_convert.tuning import tune as tuned

        with progress_shown(trail, quiet=quiet) as progress:
            found = tuned(device=device, threads=threads, dtype=dtype, progress=progress)
        print(
            f"{found.words}; {found.seconds:.0f} s; layers' times are off by "
            f"{100 * found.off:.0f} % (median)"
        )


def latency_at(ctx: typer.Context, words: list[str] | None) -> dict[str, object] | None:
    """Read ``--latency-at``: KEY=VALUE words, none of them twice."""
    if words is None:
        return None
    from bp_convert.values.marks import read_word

    found: dict[str, object] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value or key in found:
            raise typer.BadParameter(
                f"--latency-at {word!r} is no KEY=VALUE of its own, such as batch=8", ctx=ctx
            )
        found[key] = read_word(value)
    return found
