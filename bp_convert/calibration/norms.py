"""Batch norms told how the statistics of their inputs changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.calibration.tap import Batches, run_quietly
from bp_convert.graph.clone import clone
from bp_convert.graph.running import in_mode
from bp_convert.torch_private import BatchNormBase

LEAST, MOST = 0.25, 4.0  # bounds of the factor by which a variance is taken to have changed


class Norms:
    """Keeps a converted model's batch norms in step with the source's while it runs.

    Running means are shifted and running variances scaled by what conversion changed. Statistics
    of both models are taken on the same data, and only their difference is carried over: what the
    source learnt on its own training data stays, however few the examples. A norm is settled
    before it computes, from all batches since ``restart``, so that what is behind it gets what it
    will get from the finished model.

    Args:
        source: it is run once on each batch.
        converted: runs on them in eval mode, each told by ``next`` first.
    """

    def __init__(self, source: nn.Module, converted: nn.Module, batches: Batches) -> None:
        self.pairs: dict[str, tuple[Any, Any]] = {
            name: (module, converted.get_submodule(name))
            for name, module in source.named_modules()
            if isinstance(module, BatchNormBase) and module.running_mean is not None
        }
        self.on, self.late = True, False
        self.seen = self._looked_at(source, batches) if self.pairs else []
        self.restart()
        self.next(0)

    def restart(self) -> None:
        """Forget what the converted model's norms got: a layer has changed."""
        self.sums = {name: (_Sums(), _Sums()) for name in self.pairs}

    def next(self, number: int) -> None:
        """Tell that the batch of that number comes next."""
        self.number, self.joined = number, set[str]()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the norms as they are in what runs."""
        before, self.on = self.on, False
        try:
            yield
        finally:
            self.on = before

    def __enter__(self) -> Norms:
        self.handles = [
            converted.register_forward_pre_hook(self._hook(name), with_kwargs=True)
            for name, (_, converted) in self.pairs.items()
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _looked_at(self, source: nn.Module, batches: Batches) -> list[dict[str, _Sums]]:
        """Return what the source's norms get of each batch."""
        found: list[dict[str, _Sums]] = []

        def hook(name: str) -> Any:
            def add(_: nn.Module, args: Any, kwargs: Any) -> None:
                found[-1][name].add(_given(args, kwargs))

            return add

        handles = [
            module.register_forward_pre_hook(hook(name), with_kwargs=True)
            for name, (module, _) in self.pairs.items()
        ]
        try:
            with in_mode(source, training=False):
                for number, batch in enumerate(batches):
                    found.append({name: _Sums() for name in self.pairs})
                    run_quietly(source, batch, number)
        finally:
            for handle in handles:
                handle.remove()
        return found

    def _hook(self, name: str) -> Any:
        @torch.no_grad()
        def add(_: nn.Module, args: Any, kwargs: Any) -> None:
            if not self.on:
                return
            source, converted = self.sums[name]
            if name not in self.joined:  # both from the same batches
                source.join(self.seen[self.number][name])
                self.joined.add(name)
            converted.add(_given(args, kwargs))
            if source.count and converted.count and not self.late:
                self._settle(name)

        return add

    def settle(self, converted: nn.Module, batches: Batches) -> None:
        """Settle all norms of the converted model, in two passes over the batches: what a norm gets
        in the first hangs on how far those before it are."""
        if not self.pairs:
            return
        with self, in_mode(converted, training=False):
            for self.late in (False, True):
                self.restart()
                for number, batch in enumerate(batches):
                    self.next(number)
                    run_quietly(converted, batch, number)
        self.late = False
        for name, (source, found) in self.sums.items():
            if source.count and found.count:
                self._settle(name)

    def _settle(self, name: str) -> None:
        source, converted = self.pairs[name]
        (old_mean, old_variance), (mean, variance) = (one.moments() for one in self.sums[name])
        tiny = 1e-12 + 1e-6 * old_variance
        factor = ((variance + tiny) / (old_variance + tiny)).clamp(LEAST, MOST)
        converted.running_mean.copy_(source.running_mean + (mean - old_mean))
        converted.running_var.copy_(source.running_var * factor)


class _Sums:
    """Mean and variance by channel, added up in float64."""

    def __init__(self) -> None:
        self.count = 0
        self.total: Any = 0.0
        self.squares: Any = 0.0

    def add(self, x: Tensor) -> None:
        if not x.numel():
            return
        axes = [axis for axis in range(x.dim()) if axis != 1]
        count = x.numel() // x.shape[1]
        variance, mean = torch.var_mean(x.float(), axes, correction=0)
        self.count += count
        self.total = self.total + count * mean.double()
        self.squares = self.squares + count * (variance.double() + mean.double().square())

    def join(self, other: _Sums) -> None:
        self.count += other.count
        self.total = self.total + other.total
        self.squares = self.squares + other.squares

    def moments(self) -> tuple[Tensor, Tensor]:
        mean = self.total / self.count
        return mean, (self.squares / self.count - mean.square()).clamp(min=0)


def _given(args: Any, kwargs: Any) -> Tensor:
    given: Tensor = args[0] if args else next(iter(kwargs.values()))
    return given


@torch.no_grad()
def settle_norms(source: nn.Module, converted: nn.Module, batches: Batches) -> None:
    """Settle all norms of ``converted`` on the data, in place."""
    before, after = clone(source, apart=True), clone(converted, apart=True)
    norms = Norms(before, after, batches)
    norms.settle(after, batches)
    for name, (_, settled) in norms.pairs.items():
        for key in ("running_mean", "running_var"):
            converted.get_submodule(name).get_buffer(key).copy_(settled.get_buffer(key))
