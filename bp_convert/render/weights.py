"""The tensors of a file, in a terminal of 80 columns."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bp_convert.files.listing import Held
from bp_convert.render.fold import common, middle

NAMES, SHAPES = 40, 18  # columns at most


def weights_line(source: str, held: Sequence[Held]) -> str:
    """Say in a line what a file holds."""
    count = sum(one.size for one in held)
    return f"{source}: weights without a model: {len(held)} tensors, {count:,} numbers"


def shown_weights(source: str, held: Sequence[Held], fix: str) -> RenderableType:
    """Return a table of the tensors; those that differ by numbers in their names are one row.

    Args:
        fix: how to learn more.
    """
    groups: dict[tuple[object, ...], list[Held]] = {}
    for one in held:
        groups.setdefault((re.sub(r"\d+", "*", one.name), one.shape, one.dtype), []).append(one)
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for head in ("tensor", "shape", "dtype"):
        table.add_column(head, no_wrap=True)
    table.add_column("numbers", justify="right", no_wrap=True)
    for same in groups.values():
        count = f" x{len(same)}" if len(same) > 1 else ""
        shape = "x".join(map(str, same[0].shape)) or "one"
        table.add_row(
            Text(middle(common([one.name for one in same]), NAMES - len(count)) + count),
            Text(middle(shape, SHAPES)),
            Text(same[0].dtype),
            Text(f"{sum(one.size for one in same):,}"),
        )
    return Group(Text(weights_line(source, held), style="bold"), table, Text(fix))
