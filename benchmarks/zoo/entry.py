"""One architecture of the zoo: how to build it, and what it is run on."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.zoo.shrink import settle

Call = tuple[tuple[Any, ...], dict[str, Any]]
BATCH = 2  # examples in a call that specs describe


@dataclass(frozen=True)
class Entry:
    """An architecture with random weights.

    Attributes:
        name: family and member, such as ``timm/levit``.
        build: makes the model; equal seeds make equal weights.
        inputs: what ``bp_convert`` is told of the input: texts such as ``3x32x32``, or nothing
            where only an example can tell.
        example: makes the arguments of one call, where the texts cannot describe them.
        watch: modules whose outputs are compared beside the model's; for detectors, whose own
            outputs have a length that depends on rounding.
        ran: the model has run once before it is converted, as a trained one has.
        modes: what it is tried in; empty means all.
        settled: batch norms get the statistics of one batch.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: tuple[str, ...] = ()
    example: Callable[[], Call] | None = None
    watch: tuple[str, ...] = ()
    ran: bool = False
    modes: tuple[str, ...] = ()
    settled: bool = False

    @property
    def family(self) -> str:
        """The library that the architecture comes from, or ``own``."""
        return self.name.partition("/")[0]

    def model(self) -> nn.Module:
        """Return the model in eval mode; the same weights each time."""
        seed_all(0)
        model = self.build()
        model.eval()  # need not return the model
        if self.settled:
            args, kwargs = self.call(model, seed=2, batch=8)
            settle(model, args, kwargs)
        return model

    def call(self, model: nn.Module, seed: int = 1, batch: int = BATCH) -> Call:
        """Return the arguments of one call; the same for equal seeds."""
        seed_all(seed)
        if self.example is not None:
            return self.example()
        from bp_convert.graph.example import make_inputs
        from bp_convert.values.tensors import TensorSpec

        specs = [TensorSpec.parse(text) for text in self.inputs]
        return make_inputs(model, specs, batch=batch, seed=seed)


def seed_all(seed: int) -> None:
    """Start every generator that a model may draw from."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def mlp(inputs: int, middle: int, outputs: int) -> nn.Sequential:
    """Return the two layers that our own models are mostly made of."""
    return nn.Sequential(nn.Linear(inputs, middle), nn.GELU(), nn.Linear(middle, outputs))
