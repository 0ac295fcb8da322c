"""What layers get in the source, caught for as many stages ahead as there is memory for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn

from bp_convert.calibration.gatherer import Gatherer, Moments, Order
from bp_convert.calibration.norms import Norms
from bp_convert.calibration.replay import NEAR, Replay
from bp_convert.calibration.tap import Batch, Batches, Tap
from bp_convert.calibration.work import memory_of, room_on
from bp_convert.graph.example import device_of
from bp_convert.graph.tree import rows_in, tensors_in
from bp_convert.graph.walk import Site

SETTLED = 0.05  # relative difference that norms may make which settle batch by batch
FEW = 3  # batches, of which a whole pass over one at each stage would be a large part
SETTLING = 4  # batches that norms settle on before a stage's inputs are looked at
Seen = Mapping[str, list[Any]]


class Ahead:
    """Runs a model once for several stages, where each alone would run it again from the start.

    Args:
        model: it is run and left as it is.
        stages: names of layers, in the order in which they are asked for.
        calls: how often each layer is called in a pass.
        limit: bytes that are held; by default a share of what is free.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Sequence[Sequence[str]],
        calls: dict[str, int],
        batches: Batches,
        limit: int | None = None,
    ) -> None:
        self.model, self.batches, self.calls = model, batches, calls
        self.stages = [[name for name in stage if name in calls] for stage in stages]
        self.limit = room_on(device_of(model)) if limit is None else limit
        self.held: dict[int, list[Seen]] = {}

    def of(self, number: int) -> Sequence[Seen]:
        """Return what the layers of a stage get, for each batch."""
        if number not in self.held:
            self.held.clear()  # before more is caught
            self.held = self._caught(number)
        return self.held[number]

    def _caught(self, first: int) -> dict[int, list[Seen]]:
        """Return what as many stages get as fit, from one on."""
        if not self.batches:
            return {first: []}
        last = self._last(first)
        names = [name for stage in self.stages[first:last] for name in stage]
        found: dict[int, list[Seen]] = {number: [] for number in range(first, last)}
        if not names:
            return {first: [{} for _ in self.batches]}
        with Tap(self.model, names, self.calls) as tap:
            for number, batch in enumerate(self.batches):
                seen = tap.run(batch, number)
                for stage, ones in found.items():
                    ones.append({name: seen.get(name, []) for name in self.stages[stage]})
        return found

    def _last(self, first: int) -> int:
        """Return the stage before which to stop, by what the first batch takes."""
        ahead = [name for stage in self.stages[first:] for name in stage]
        if not ahead:
            return first + 1
        with Tap(self.model, ahead, self.calls) as tap:
            seen = tap.run(self.batches[0])
        # Others may be longer, as of texts that are sorted by their length.
        times = sum(map(_size, self.batches)) / max(1, _size(self.batches[0]))
        held: dict[int, int] = {}
        for number in range(first, len(self.stages)):
            for name in self.stages[number]:
                held.update(map(memory_of, tensors_in(seen.get(name, []), objects=True)))
            if number > first and sum(held.values()) * times > self.limit:
                return number
        return len(self.stages)


def beside(
    model: nn.Module,
    sites: Sequence[Site],
    order: Order,
    batches: Batches,
    caught: Sequence[Seen],
    norms: Norms,
    replay: Replay,
) -> Moments:
    """Gather the moments of what layers get, beside what they got in the source; the model's batch
    norms are settled on the way.

    Args:
        caught: what they got there, for each batch.
        replay: of the model.
    """
    gatherer = Gatherer(sites, order, sum(map(rows_in, batches)), cross=True)
    norms.restart()
    names = [site.name for site in sites]
    layers = [model.get_submodule(name) for name in names]
    with norms, Tap(model, names, order.calls) as tap:

        def run(number: int, batch: Batch) -> dict[str, list[Any]]:
            norms.next(number)
            return replay.run(number, lambda: tap.run(batch, number))

        # Where passes start late there is time for norms to settle on all, and to stay so.
        late = replay.on
        first = len(batches) if late else SETTLING
        with replay.upto(layers, keeps=False):
            for number, batch in enumerate(batches[:first] if norms.pairs else ()):
                run(number, batch)
        with norms.paused() if late else nullcontext(), replay.upto(layers):
            for number, batch in enumerate(batches):
                replay.next(number)
                doubtful = number == 0 and (
                    replay.untested if len(batches) <= FEW else replay.starts_late
                )
                seen = run(number, batch)
                if doubtful:
                    with replay.paused(), norms.paused():
                        whole = tap.run(batch)
                    replay.same(seen, whole, SETTLED if norms.pairs else NEAR)
                    seen = seen if replay.on else whole
                gatherer.add(seen, number, batch, caught[number])
    return gatherer.result()


def _size(batch: Batch) -> int:
    return sum(one.numel() for one in tensors_in(batch, objects=True))
