"""Bare parameters (E, K, D) whose matrices a class multiplies by, as mixtures of experts do. The
layer is what stands in the parameter's place, ``experts.stack.Stack``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from bp_convert.experts.stack import BPStack
from bp_convert.kinds.choices import Factors, Widths
from bp_convert.kinds.kind import Examples, Kind
from bp_convert.kinds.linear_kind import LinearKind, matrix_counts
from bp_convert.kinds.shapes import Form, Shape
from bp_convert.kinds.speed import Counts
from bp_convert.kinds.spread import Spread


class MatrixStackKind(Kind):
    name = "Stack"
    twin: ClassVar[Any] = BPStack
    priced_as = LinearKind.name
    bare = True

    def form(self, module: Any) -> Form:
        raise NotImplementedError("widths do not travel through a stack")

    def refuse(self, module: Any) -> str | None:
        return None

    def widths(self, module: Any) -> Widths:
        return module.in_features, module.out_features

    def examples(self, module: Any, name: str) -> Examples:
        return iter(())

    def params(self, module: Any, widths: Widths, factors: Factors | None = None) -> int:
        one = widths[0] * widths[1] if factors is None else factors["weight"].params
        return int(module.many * one)

    def operations(
        self, module: Any, widths: Widths, factors: Factors, shape: Shape
    ) -> tuple[Counts, Counts]:
        rows = 1
        for size in shape[:-1]:
            rows *= size
        return matrix_counts(rows, widths, factors["weight"])

    def output_norms(self, module: Any) -> None:
        return None

    def spread(self, module: Any, spread: Spread) -> dict[str, Tensor]:
        return {"weight": module.weight}

    # The matrices of the role are those of the experts.

    def matrices(
        self, module: Any, spread: Spread, factors: Factors | None = None
    ) -> dict[str, list[Tensor]]:
        return {"weight": list(module.weight)}

    @torch.no_grad()
    def place(self, twin: Any, role: str, index: int, w1: Tensor, w2: Tensor) -> None:
        twin.w1[index].copy_(w1)
        twin.w2[index].copy_(w2)

    @torch.no_grad()
    def add(self, module: Any, role: str, changes: Sequence[Tensor]) -> None:
        module.weight.add_(torch.stack(list(changes)).to(module.weight))
