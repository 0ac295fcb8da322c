"""A model's own time on example inputs, and that of its layers within it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median, quantiles
from typing import Any, Protocol

import torch
from torch import nn

from bp_convert.graph.running import Args, Kwargs, evaluating, quiet_forward, same_draws
from bp_convert.tuning.clock import own_time, threads
from bp_convert.tuning.machine_table import Host

WHOLE = ""  # the name that a model's own time goes by
REPEATS = 15
FEW = 3  # passes at least, however long they take
SECONDS = 10.0  # for the passes of one measurement, after which no more are made


@dataclass(frozen=True)
class Subject:
    """A model to time.

    Attributes:
        make: makes a copy that may be moved and switched.
        layers: names of its layers.
    """

    make: Callable[[], nn.Module]
    layers: tuple[str, ...]


class Stopwatch(Protocol):
    """Times models in turn."""

    def __call__(
        self,
        subjects: list[Subject],
        inputs: Callable[[nn.Module], tuple[Args, Kwargs]],
        host: Host,
    ) -> list[dict[str, float]]:
        """Return each one's microseconds by name of layer, and its own by the name ``WHOLE``."""


def time_models(
    subjects: list[Subject], inputs: Callable[[nn.Module], tuple[Args, Kwargs]], host: Host
) -> list[dict[str, float]]:
    """Time models that take turns, each whole and, in passes of their own, layer by layer.

    Args:
        inputs: makes what a model is called with, on its device.
    """
    device = torch.device(host.device)
    with threads(host.threads), torch.no_grad(), quiet_forward(), same_draws():
        runs = []
        for one in subjects:
            model = evaluating(one.make().to(device))
            args, kwargs = inputs(model)
            runs.append(_Passes(partial(model, *args, **kwargs), model, one.layers, device))
        start = time.perf_counter()
        for run in runs:
            run.call()
        count = 0
        while count < REPEATS and (count < FEW or time.perf_counter() - start < SECONDS):
            for run in runs:
                run.once()
            count += 1
    return [run.found() for run in runs]


@dataclass
class _Passes:
    """One model's passes."""

    call: Callable[[], Any]
    model: nn.Module
    layers: tuple[str, ...]
    device: torch.device
    whole: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)

    def once(self) -> None:
        """Time a pass, and the layers in another."""
        start = own_time(self.device)
        self.call()
        self.whole.append(own_time(self.device) - start)
        taken: dict[str, float] = {}
        with _hooked(self.model, self.layers, self.device, taken):
            self.call()
        for name, one in taken.items():
            self.parts.setdefault(name, []).append(one)

    def found(self) -> dict[str, float]:
        whole = quantiles(self.whole, n=4)[0]
        parts = {name: median(ones) for name, ones in self.parts.items()}
        # Watching costs time, too: the layers are no more than the whole.
        share = min(1.0, whole / max(1e-12, sum(parts.values())))
        return {
            WHOLE: 1e6 * whole,
            **{name: 1e6 * share * one for name, one in parts.items()},
        }


@contextmanager
def _hooked(
    model: nn.Module, layers: tuple[str, ...], device: torch.device, taken: dict[str, float]
) -> Any:
    """Add up the seconds of each layer's calls while the model runs."""
    modules: Mapping[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
    handles = []
    for name in layers:
        if name not in modules:
            continue
        started: list[float] = []

        def before(*_: Any, started: list[float] = started) -> None:
            started.append(own_time(device))

        def after(*_: Any, started: list[float] = started, name: str = name) -> None:
            if started:
                taken[name] = taken.get(name, 0.0) + own_time(device) - started.pop()

        handles += [
            modules[name].register_forward_pre_hook(before),
            modules[name].register_forward_hook(after),
        ]
    try:
        yield
    finally:
        for one in handles:
            one.remove()
