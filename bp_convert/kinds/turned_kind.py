"""transformers' Conv1D: the layers of GPT-2, whose weight is a Linear's turned round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.kinds.choices import Factors, Widths
from bp_convert.kinds.kind import has_bias
from bp_convert.kinds.linear_kind import LinearKind
from bp_convert.kinds.shapes import Form, Sizes, shape_of
from bp_convert.kinds.spread import Spread
from bp_convert.layers.turned import BPConv1D, conv1d


class TurnedKind(LinearKind):
    name = "Conv1D"
    twin = BPConv1D
    priced_as = LinearKind.name

    @property
    def dense(self) -> type[nn.Module]:
        return conv1d()

    def form(self, module: Any) -> Form:
        return turned_form(module, self.base_of(module))

    def widths(self, module: Any) -> Widths:
        shape = shape_of(module, "weight") or ()
        return (shape[0], shape[1]) if len(shape) == 2 else (module.nx, module.nf)

    def output_norms(self, module: Any) -> Tensor:
        norms: Tensor = module.weight.double().square().sum(0)
        return norms

    def spread(self, module: Any, spread: Spread) -> dict[str, Tensor]:
        wide = {"weight": spread.columns(spread.rows(module.weight, 1), 0)}
        if has_bias(module):
            wide["bias"] = spread.rows(module.bias)
        return wide

    def source(self, module: Any) -> Tensor:
        weight: Tensor = module.weight.t()
        return weight

    def matrices(
        self, module: Any, spread: Spread, factors: Factors | None = None
    ) -> dict[str, list[Tensor]]:
        return {"weight": [self.spread(module, spread)["weight"].t()]}

    @torch.no_grad()
    def add(self, module: Any, role: str, changes: Sequence[Tensor]) -> None:
        module.weight.add_(changes[0].t().to(module.weight))


def turned_form(module: Any, base: type[nn.Module]) -> Form:
    """Return the form of transformers' layer, or of another library's that is written like it."""
    return Form(
        own={"out": module.nf},
        inputs=((-1, getattr(module, "nx", module.weight.shape[0])),),
        sizes=lambda own, inp: Sizes(
            {"weight": (inp[0], own["out"]), "bias": (own["out"],)},
            {"nf": own["out"], **({"nx": inp[0]} if hasattr(module, "nx") else {})},
            own["out"],
        ),
        base=base,
    )
