"""The layers that are timed: as models have them, with the shapes of their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product, zip_longest

from torch import nn

from bp_convert.kinds import Ask, Factors, Kind, Widths

SHARES = (1, 4, 0.25)  # ranks, or shares of the parameters, of nearest-square pairs
LOW = (0.25, 0.1)  # shares of those of low rank
WIDTHS = (
    *((16, 16), (32, 64), (64, 10), (128, 128), (256, 64), (256, 256), (384, 1536), (512, 512)),
    *((768, 768), (768, 3072), (3072, 768), (1024, 1024), (2048, 512), (1152, 256), (4096, 4096)),
)
IMAGES = (  # channels in and out, and the size
    *((1, 32, 28), (3, 32, 32), (3, 64, 112), (16, 16, 32), (32, 64, 14), (32, 32, 32)),
    *((64, 64, 56), (64, 128, 28), (128, 128, 28), (256, 256, 14), (512, 512, 7), (24, 144, 28)),
    *((128, 32, 14), (1024, 2048, 7)),
)
STACKS = (nn.LSTM, nn.GRU, nn.RNN)
CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)


@dataclass(frozen=True)
class GridCase:
    """A layer, made when it is timed, and the shape of its input."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


def grid() -> list[GridCase]:
    """Return the layers to time, those of different families in turn, so that whoever stops
    before the end has some of each."""
    families = (_linears(), _images(), _others(), _tables(), _stacks(), _cells())
    return [one for row in zip_longest(*families) for one in row if one is not None]


def factorings(kind: Kind, module: nn.Module, widths: Widths) -> list[Factors]:
    """Return factors of a layer to time: of nearest-square pairs and of low rank."""
    found = [kind.factor(module, widths, Ask(rank=rank)) for rank in SHARES]
    choices = kind.choices(module, widths)
    for share in LOW:
        factors = {}
        for role, one in choices.items():
            flat = [spec for spec in one.specs() if spec.out[1] == spec.inp[0] == 1]
            if flat:
                numbers = flat[0].out[0] * flat[0].inp[1]
                rank = max(1, int(share * numbers / flat[0].params))
                factors[role] = flat[0].model_copy(update={"rank": rank})
        if len(factors) == len(choices):
            found.append(factors)
    return [one for at, one in enumerate(found) if one not in found[:at]]


def _linears() -> Iterator[GridCase]:
    for rows, (inputs, outputs) in product((1, 16, 197), WIDTHS):
        yield GridCase(partial(nn.Linear, inputs, outputs), (rows, inputs))


def _images() -> Iterator[GridCase]:
    for kernel, stride, (inputs, outputs, size) in product((3, 1), (1, 2), IMAGES):
        if inputs < 1024 or kernel == 1:
            conv = partial(nn.Conv2d, inputs, outputs, kernel, stride, kernel // 2)
            yield GridCase(conv, (1, inputs, size, size))
    for inputs, outputs, kernel, size in ((3, 64, 7, 112), (96, 256, 5, 27), (64, 64, 5, 28)):
        conv = partial(nn.Conv2d, inputs, outputs, kernel, 1, kernel // 2)
        yield GridCase(conv, (1, inputs, size, size))
    for inputs, size in ((128, 14), (256, 7)):
        yield GridCase(partial(nn.Conv2d, inputs, inputs, 3, 1, 1), (8, inputs, size, size))


def _others() -> Iterator[GridCase]:
    for inputs, outputs, size in ((128, 16, 32), (64, 64, 256), (1, 128, 1024)):
        yield GridCase(partial(nn.Conv1d, inputs, outputs, 9, 1, 4), (1, inputs, size))
        long = partial(nn.Conv2d, inputs, outputs, (64, 1), 1, (32, 0))
        yield GridCase(long, (1, inputs, size, 1))
    for inputs, outputs in ((3, 16), (32, 32), (64, 64)):
        yield GridCase(partial(nn.Conv3d, inputs, outputs, 3, 1, 1), (1, inputs, 8, 16, 16))


def _tables() -> Iterator[GridCase]:
    for (rows, columns), tokens in product(((1000, 64), (30522, 384), (8256, 256)), (8, 128)):
        yield GridCase(partial(nn.Embedding, rows, columns), (1, tokens))
    bags = ((1, 5), (1, 40), (128, 20), (512, 5))
    for (rows, columns), shape in product(((1000, 16), (10_000, 64), (100_000, 128)), bags):
        yield GridCase(partial(nn.EmbeddingBag, rows, columns, mode="sum"), shape)


def _stacks() -> Iterator[GridCase]:
    sizes = ((32, 64), (40, 256), (128, 512), (256, 1000))
    passes = [(*one, 1, steps) for one, steps in product(sizes, (8, 40))]
    passes += [(1500, 1500, 1, 20)]
    passes += [(*one, n, 20) for one, n in product(((32, 64), (256, 256), (128, 512)), (8, 32))]
    for (inputs, hidden, batch, steps), stack in product(passes, STACKS):
        if hidden <= 1000 or stack is nn.LSTM:
            make = partial(stack, inputs, hidden, batch_first=True)
            yield GridCase(make, (batch, steps, inputs))


def _cells() -> Iterator[GridCase]:
    sizes = ((32, 64), (64, 128), (256, 256), (128, 512), (512, 1024))
    for (inputs, hidden), batch, cell in product(sizes, (1, 8, 32), CELLS):
        yield GridCase(partial(cell, inputs, hidden), (batch, inputs))
