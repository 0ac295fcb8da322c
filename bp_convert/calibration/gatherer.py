"""Moments of every weight of a model, from running it on data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from bp_convert.calibration.moments import Moment, rows_wanted
from bp_convert.calibration.tap import Batch, Batches, Tap, token_mask
from bp_convert.graph.tree import rows_in
from bp_convert.graph.walk import Site
from bp_convert.kinds import Spread
from bp_convert.seen.pick import Pick
from bp_convert.torch_private import BatchNormBase
from bp_convert.values.progress import Progress, unheard

LOOKS = 8  # batches that are looked at for layers that not every batch reaches
FEW = 4  # rows, of which there are too few to compare with others
SAME = 512  # rows by which it is told whether two models' rows are of the same examples
Moments = dict[tuple[str, str], list[Moment]]  # by layer and role, one for each direction


@dataclass
class Order:
    """What one pass over a batch tells of the layers.

    Attributes:
        calls: how often each layer is called; layers that are not called are missing.
        together: layers in the order of their first call, those that read the same tensor
            grouped.
        normed: layers whose output goes straight into a batch norm, which takes up its mean.
    """

    calls: dict[str, int] = field(default_factory=dict)
    together: list[list[str]] = field(default_factory=list)
    normed: frozenset[str] = frozenset()

    def stages(self, most: int) -> list[list[str]]:
        """Return groups of layers that are looked at in one pass: those that read one tensor, and
        neighbours where there would be more passes than ``most``."""
        groups = self.together
        if len(groups) <= most:
            return groups
        edges = [round(i * len(groups) / most) for i in range(most + 1)]
        return [[name for group in groups[a:b] for name in group] for a, b in pairwise(edges)]


def order_of(model: nn.Module, sites: Sequence[Site], batches: Batches) -> Order:
    """Run the model and say in what order its layers are called.

    One batch tells, where it calls them all; of a model that routes its inputs, such as to
    experts, up to ``LOOKS`` batches are looked at.
    """
    made: dict[int, str] = {}
    held: list[Any] = []
    normed: set[str] = set()

    def note(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                held.append(output)  # so that its address is not given out again
                made[id(output)] = name

        return hook

    def ask(_: nn.Module, args: Any, kwargs: Any) -> None:
        first = next(iter((*args, *kwargs.values())), None)
        if id(first) in made:
            normed.add(made[id(first)])

    calls: dict[str, int] = {}
    together: list[list[str]] = []
    with ExitStack() as hooks, Tap(model, [site.name for site in sites]) as tap:
        for site in sites:
            called = model.get_submodule(site.name)
            hooks.enter_context(called.register_forward_hook(note(site.name)))
        for module in model.modules():
            if isinstance(module, BatchNormBase):
                hooks.enter_context(module.register_forward_pre_hook(ask, with_kwargs=True))
        for number, batch in enumerate(batches[:LOOKS]):
            made.clear()
            held.clear()
            groups: dict[int, list[str]] = {}
            for name, inputs in tap.run(batch, number).items():
                if name not in calls:
                    groups.setdefault(id(inputs[0]), []).append(name)
                calls[name] = max(len(inputs), calls.get(name, 0))
            together += groups.values()
            if len(calls) == len(sites):
                break
    return Order(calls, together, frozenset(normed))


class Gatherer:
    """Adds up the moments of a few layers, batch by batch.

    Args:
        examples: the number of examples to come, which tells how many rows to take of each batch.
        cross: compare with another model that runs beside.
    """

    def __init__(
        self, sites: Sequence[Site], order: Order, examples: int, *, cross: bool = False
    ) -> None:
        self.sites = sites
        self.normed = order.normed
        self.examples = max(1, examples)
        self.cross = cross
        self.found: Moments = {}
        self.columns = {site.name: _columns(site) for site in sites}
        self.leaders = _leaders(sites, order)

    def add(
        self,
        seen: Mapping[str, list[Any]],
        number: int,
        batch: Batch,
        other: Mapping[str, list[Any]] | None = None,
    ) -> None:
        """Add what one batch showed.

        Args:
            number: of the batch, so that each takes other rows.
            other: the same inputs in the source model.
        """
        size, mask = rows_in(batch), token_mask(batch)
        for site in self.sites:
            if self.leaders[site.name] != site.name:
                continue
            for call, x in enumerate(seen.get(site.name, ())):
                share = ceil(
                    rows_wanted(max(self.columns[site.name].values())) * size / self.examples
                )
                pick = Pick(share, crc32(f"{site.name}:{number}:{call}".encode()), mask)
                rows = site.kind.rows(site.module, x, pick)
                whole = x if other is None else _call(other, site.name, call)
                beside = None
                if other is not None and whole is not None:
                    beside = site.kind.rows(site.module, whole, pick)
                for role, sides in rows.items():
                    moments = self._moments(site, role, len(sides))
                    for side, (moment, part) in enumerate(zip(moments, sides, strict=True)):
                        partner = None if beside is None else beside[role][side]
                        if partner is None or not same_examples(part, partner):
                            moment.part()
                        moment.add(part, partner if moment.paired else None)
                if whole is None:
                    continue
                for role, counts in site.kind.weights(site.module, whole).items():
                    for moment, one in zip(self.found[site.name, role], counts, strict=True):
                        moment.weigh(one)

    def result(self) -> Moments:
        """Return the moments of each role of each layer, one for each direction."""
        for site in self.sites:
            for role in self.columns[site.name]:
                found = self.found.get((self.leaders[site.name], role))
                if found is not None:
                    self.found[site.name, role] = found
        return self.found

    def _moments(self, site: Site, role: str, sides: int) -> list[Moment]:
        key = (site.name, role)
        if key not in self.found:
            choices = site.kind.choices(site.module, site.kind.widths(site.module))[role]
            self.found[key] = [
                Moment(
                    self.columns[site.name][role],
                    choices.kernel,
                    lookup=site.kind.lookup,
                    # whether its mean error is taken up, by a bias or a batch norm behind
                    centred=site.name in self.normed or site.kind.centred(site.module, role),
                    cross=self.cross,
                    name=site.name,
                )
                for _ in range(sides)
            ]
        return self.found[key]


def same_examples(rows: Tensor, other: Tensor) -> bool:
    """Tell whether rows (n, D) of two models are of the same examples, one by one.

    A model that routes its inputs may give a layer other rows than its conversion does. Rows of
    the same examples are nearer to each other than to those of others, however much the
    conversion has changed them; where they are not, nothing is to be learnt from the pairing.
    """
    if rows.shape != other.shape:
        return False
    if not rows.is_floating_point():
        return torch.equal(rows, other)
    some = slice(None, None, max(1, len(rows) // SAME))
    one, two = rows[some].double(), other[some].double()
    gap = float((one - two).square().sum())
    if len(one) < FEW:
        return gap <= float(two.square().sum())
    return gap <= float((one - two.roll(1, 0)).square().sum())


def _call(seen: Mapping[str, list[Any]], name: str, call: int) -> Any:
    """Return the input of a call; None where there was no such call."""
    calls = seen.get(name, ())
    return calls[call] if call < len(calls) else None


def _columns(site: Site) -> dict[str, int]:
    """Return the number of columns of each role's matrices."""
    matrices = site.kind.matrices(site.module, Spread())
    return {role: ones[0].shape[1] for role, ones in matrices.items()}


def _leaders(sites: Sequence[Site], order: Order) -> dict[str, str]:
    """Return, for each layer, the one whose moments are its own too: the first of the Linears
    that read the same tensor."""
    kinds = {site.name: site for site in sites}
    leaders = {site.name: site.name for site in sites}
    for group in order.together:
        same: dict[bool, str] = {}
        for name in group:
            site = kinds.get(name)
            if site is not None and site.kind.same_rows and order.calls[name] == 1:
                leaders[name] = same.setdefault(getattr(site.module, "bias", None) is None, name)
    return leaders


def gather(
    model: nn.Module,
    sites: Sequence[Site],
    batches: Batches,
    order: Order,
    progress: Progress = unheard,
) -> Moments:
    """Return the moments of each role of each layer, one for each direction.

    Raises:
        DataError: the model does not run on the data.
    """
    gatherer = Gatherer(sites, order, sum(rows_in(batch) for batch in batches))
    names = [site.name for site in sites if site.name in order.calls]
    with Tap(model, names, order.calls) as tap:
        for number, batch in enumerate(batches):
            progress("looking at calibration data", number, len(batches))
            gatherer.add(tap.run(batch, number), number, batch)
    return gatherer.result()
