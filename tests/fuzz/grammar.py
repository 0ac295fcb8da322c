"""One integer, one architecture: a grammar of small random models over all kinds.

``case(seed)`` always gives the same model; ``python -m tests.fuzz.check SEED`` shows and tries it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrizations, vector_to_parameters, weight_norm

from tests.fuzz import blocks

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 7, 13)
EVEN = (4, 6, 8, 12, 16, 24)
CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
UPS = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
POOLS = {1: nn.AvgPool1d, 2: nn.MaxPool2d, 3: nn.AvgPool3d}
HOLDERS = ("partial", "list", "dictionary", "closure", "method")
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
ACTIVATIONS = (nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU, nn.Sigmoid, nn.LeakyReLU)
ROWS = 5  # examples in the call that is compared


@dataclass
class Case:
    """A model and what it is run on.

    Attributes:
        model: in eval mode.
        inputs: what ``bp_convert`` is told.
        x: the input that outputs are compared on.
        keyword: the input goes by the name ``x``.
        marks: what was done to the model, in words.
    """

    model: nn.Module
    inputs: list[str]
    x: torch.Tensor
    keyword: bool
    marks: list[str] = field(default_factory=list)


def case(seed: int) -> Case:
    """Return the architecture of a seed."""
    torch.manual_seed(seed)
    return _Maker(random.Random(seed)).case(1 + seed % 4)


class _Maker:
    """Draws an architecture. A form is ``rows`` (N, C), ``steps`` (N, T, C) or 1, 2, 3: maps
    (N, C, ...) of that many axes."""

    def __init__(self, drawn: random.Random) -> None:
        self.drawn = drawn
        self.marks: list[str] = []

    def case(self, size: int) -> Case:
        form = self.drawn.choice(["rows", "rows", "steps", "ids", 1, 2, 2, 3])
        width = self.drawn.choice(WIDTHS)
        parts: list[nn.Module] = []
        if form == "ids":
            count = self.drawn.choice((5, 16, 30))
            text, x = f"int64:1x6<{count}", torch.randint(0, count, (ROWS, 6))
            parts.append(self.table(count, width))
            form = "steps"
        else:
            axes = {"rows": (), "steps": (6,), 1: (16,), 2: (8, 12), 3: (4, 4, 4)}[form]
            shape = (*axes, width) if form == "steps" else (width, *axes)
            text = "float32:1x" + "x".join(str(n) for n in shape)
            x = torch.randn(ROWS, *shape)
        for _ in range(size):
            part, width = self.part(form, width)
            parts.append(part)
        head = self.head(form, width)
        keyword = self.drawn.random() < 0.15
        wrapped = self.drawn.choice(list(blocks.WRAPPERS))
        model = (blocks.ByKeyword if keyword else blocks.Net)(parts, head, wrapped)
        self.alter(model)
        if x.is_floating_point():
            x = x.to(next(model.parameters()).dtype)
        return Case(model.eval(), [f"x={text}" if keyword else text], x, keyword, self.marks)

    def table(self, count: int, width: int) -> nn.Module:
        more = self.drawn.choice([{}, {}, {"padding_idx": 0}, {"max_norm": 1.0}])
        return nn.Embedding(count, width, **more)

    # Parts, each (module, width after)

    def part(self, form: str | int, width: int, depth: int = 0) -> tuple[nn.Module, int]:
        plain: list[Callable[[], tuple[nn.Module, int]]] = [lambda: self.layer(form, width)] * 4
        if depth > 1:
            return plain[0]()

        def kept() -> nn.Module:
            return self.same(form, width, depth)

        wrapped: list[Callable[[], tuple[nn.Module, int]]] = [
            lambda: (blocks.Residual(kept()), width),
            lambda: (blocks.Residual(kept()), width),
            lambda: (nn.Sequential(kept(), self.activation()), width),
            lambda: (nn.Sequential(kept(), self.activation()), width),
            lambda: self.branches(form, width, depth),
            lambda: self.branches(form, width, depth),
            lambda: (blocks.Drop(kept()), width),
            lambda: (blocks.Twice(kept()), width),
            lambda: (blocks.Quiet(kept()), width),
            lambda: (blocks.Counts(kept()), width),
            lambda: (blocks.Cached(kept(), self.drawn.random() < 0.5), width),
            lambda: (blocks.Noise(self.drawn.random() < 0.5), width),
            lambda: (nn.Dropout(0.3), width),
            lambda: (blocks.InFunctions(kept(), self.drawn.choice(HOLDERS)), width),
            lambda: (blocks.Recomputed(kept(), self.drawn.random() < 0.5), width),
            lambda: (blocks.InPlace(kept()), width),
            lambda: (blocks.Exits(kept(), kept()), width),
            lambda: (blocks.Sliced(kept(), self.activation(), kept()), width),
            lambda: (blocks.Delegates(kept()), width),
        ]
        if depth == 0:
            wrapped.append(lambda: (blocks.Tapped(kept(), kept()), width))
        if depth == 0 and isinstance(form, int):
            wrapped += [lambda: self.resized(form, width)] * 3
        return self.drawn.choice(plain + wrapped)()

    def same(self, form: str | int, width: int, depth: int) -> nn.Module:
        """Return a part that keeps the width."""
        part, after = self.part(form, width, depth + 1)
        if after == width:
            return part
        return nn.Sequential(part, self.activation(), self.layer(form, after, width)[0])

    def branches(self, form: str | int, width: int, depth: int) -> tuple[nn.Module, int]:
        how = self.drawn.choice(["cat", "gate", "add"])
        axis = -1 if isinstance(form, str) else 1
        one, two = self.same(form, width, depth), self.same(form, width, depth)
        return blocks.Branches(one, two, how, axis), width * (2 if how == "cat" else 1)

    def activation(self) -> nn.Module:
        return self.drawn.choice(ACTIVATIONS)()

    def layer(self, form: str | int, width: int, to: int = 0) -> tuple[nn.Module, int]:
        after = to or self.drawn.choice(WIDTHS)
        if isinstance(form, int):
            return self.maps(form, width, after, free=not to)
        if form == "steps" and self.drawn.random() < 0.6:
            return self.steps(width, after, free=not to)
        return self.rows(width, after, free=not to)

    def rows(self, width: int, after: int, free: bool) -> tuple[nn.Module, int]:
        bias = self.drawn.random() < 0.7
        made: list[Callable[[], tuple[nn.Module, int]]] = [
            lambda: (nn.Linear(width, after, bias), after),
            lambda: (nn.Linear(width, after, bias), after),
            lambda: (blocks.Louder(width, after), after),
            lambda: (self.asked(nn.Linear(width, after), nn.Linear), after),
            lambda: (blocks.ReadsWidth(nn.Linear(width, after)), after),
            lambda: (blocks.Functional(nn.Linear(width, after)), after),
            lambda: (blocks.Keyword(nn.Linear(width, after)), after),
            lambda: (self.hooked(nn.Linear(width, after)), after),
            lambda: (nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, after)), after),
        ]
        if free:
            made += [
                lambda: (nn.LayerNorm(width), width),
                lambda: (blocks.Keyword(nn.LayerNorm(width)), width),
                lambda: (blocks.Tied(width), width),
                lambda: (blocks.Own(width), width),
                lambda: (blocks.Transposed(width, after), width),
                lambda: (
                    blocks.Routed(width, nn.Linear(width, width), nn.Linear(width, width)),
                    width,
                ),
            ]
        return self.drawn.choice(made)()

    def steps(self, width: int, after: int, free: bool) -> tuple[nn.Module, int]:
        both = after % 2 == 0 and self.drawn.random() < 0.4
        layers = self.drawn.choice((1, 1, 2))
        first, packed = self.drawn.random() < 0.6, self.drawn.random() < 0.3
        hidden = after // 2 if both else after
        kind = self.drawn.choice((nn.LSTM, nn.LSTM, nn.GRU, nn.RNN))
        rnn = kind(width, hidden, layers, bidirectional=both, batch_first=first)
        made = [(blocks.Unpacked(rnn, packed), after)]
        conv = nn.Conv1d(width, after, 3, padding=1)
        made.append((blocks.Swapped(conv), after))
        if free and width % 2 == 0:
            fast = nn.TransformerEncoderLayer(
                width, 2, 16, batch_first=True, norm_first=self.drawn.random() < 0.5
            )
            made += [(blocks.Attend(width, self.drawn.random() < 0.5), width), (fast, width)]
        return self.drawn.choice(made)

    def maps(self, axes: int, width: int, after: int, free: bool) -> tuple[nn.Module, int]:
        kernel = self.drawn.choice((1, 3, 3))
        dilation = self.drawn.choice((1, 1, 2)) if kernel > 1 else 1
        mode = self.drawn.choice(["zeros"] * 4 + ["circular", "replicate"])
        groups = self.drawn.choice([n for n in (1, 1, 1, 2, width) if width % n == after % n == 0])
        padding = "same" if self.drawn.random() < 0.2 else dilation * (kernel // 2)
        conv = CONVS[axes](
            width, after, kernel, padding=padding, dilation=dilation, groups=groups,
            padding_mode=mode, bias=self.drawn.random() < 0.7,
        )  # fmt: skip
        made: list[Callable[[], tuple[nn.Module, int]]] = [
            lambda: (conv, after),
            lambda: (conv, after),
            lambda: (nn.Sequential(conv, NORMS[axes](after), self.activation()), after),
            lambda: (self.asked(conv, nn.modules.conv._ConvNd), after),
            lambda: (self.hooked(conv), after),
        ]
        if free:
            made.append(lambda: (NORMS[axes](width), width))
            made.append(lambda: (nn.GroupNorm(1, width), width))
        return self.drawn.choice(made)()

    def resized(self, axes: int, width: int) -> tuple[nn.Module, int]:
        """Return a part that halves or doubles the maps."""
        after = self.drawn.choice(WIDTHS)
        made: list[Callable[[], tuple[nn.Module, int]]] = [
            lambda: (CONVS[axes](width, after, 3, 2, 1), after),
            lambda: (CONVS[axes](width, after, 2, 2), after),
            lambda: (UPS[axes](width, after, 2, 2), after),
            lambda: (POOLS[axes](2), width),
            lambda: (nn.Upsample(scale_factor=2), width),
        ]
        return self.drawn.choice(made)()

    def asked(self, layer: nn.Module, kind: type[nn.Module]) -> nn.Module:
        """Return a layer that is asked for its type, which conversion changes; seldom."""
        return blocks.ByType(layer, kind) if self.drawn.random() < 0.15 else layer

    def hooked(self, layer: nn.Module) -> nn.Module:
        layer.register_forward_hook(blocks.Halved())
        self.marks.append("a hook on a layer")
        return layer

    def head(self, form: str | int, width: int) -> nn.Module:
        outputs = self.drawn.choice((1, 3, 10))
        if form == "rows":
            return nn.Linear(width, outputs)
        if form == "steps":
            means = self.drawn.random() < 0.5
            first = blocks.Mean((1,)) if means else nn.Identity()
            return nn.Sequential(first, nn.Linear(width, outputs))
        if self.drawn.random() < 0.5:
            return CONVS[int(form)](width, outputs, 1)
        axes = tuple(range(2, 2 + int(form)))
        return nn.Sequential(blocks.Mean(axes), nn.Linear(width, outputs))

    # What is done to the whole

    def alter(self, model: nn.Module) -> None:
        for _ in range(self.drawn.choice((0, 0, 1, 1, 2))):
            name = self.drawn.choice([one for one in dir(self) if one.startswith("do_")])
            getattr(self, name)(model)
            self.marks.append(name.removeprefix("do_").replace("_", " "))

    def some(self, model: nn.Module) -> nn.Module:
        kinds = (nn.Linear, nn.modules.conv._ConvNd)
        layers = [m for m in model.modules() if isinstance(m, kinds) and "weight" in m._parameters]
        return self.drawn.choice(layers or [nn.Linear(2, 2)])

    def do_freeze_all(self, model: nn.Module) -> None:
        model.requires_grad_(False)

    def do_freeze_some(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.requires_grad_(self.drawn.random() < 0.5)

    def do_zero_weight(self, model: nn.Module) -> None:
        nn.init.zeros_(self.some(model).weight)

    def do_tiny_weight(self, model: nn.Module) -> None:
        self.some(model).weight.data *= 1e-6

    def do_flat_storage(self, model: nn.Module) -> None:
        flat = parameters_to_vector(model.parameters()).detach().clone()
        vector_to_parameters(flat, model.parameters())

    def do_double(self, model: nn.Module) -> None:
        model.double()

    def do_old_weight_norm(self, model: nn.Module) -> None:
        weight_norm(self.some(model))

    def do_new_weight_norm(self, model: nn.Module) -> None:
        parametrizations.weight_norm(self.some(model))

    def do_spectral_norm(self, model: nn.Module) -> None:
        parametrizations.spectral_norm(self.some(model))

    def do_hook(self, model: nn.Module) -> None:
        self.some(model).register_forward_hook(blocks.Halved())

    def do_closure(self, model: nn.Module) -> None:
        scale = torch.tensor(0.5)
        self.some(model).register_forward_hook(lambda m, i, o: o * scale.to(o.dtype))

    def do_alias(self, model: nn.Module) -> None:
        model.alias = self.some(model)

    def do_own_list(self, model: nn.Module) -> None:
        model.layers_in_a_list = [self.some(model)]

    def do_grads(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
