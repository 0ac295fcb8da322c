"""nn.Bilinear: its weight (K, I1, I2) is a matrix (K, I1*I2) on the outer product of its inputs.

Its first input and its output are its widths; the second input keeps its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor, nn

from bp_convert.kinds.choices import Ask, Choices, Factors, Widths
from bp_convert.kinds.kind import Examples, Kind
from bp_convert.kinds.linear_kind import LinearKind, matrix_counts
from bp_convert.kinds.recurrent import Forward, require
from bp_convert.kinds.shapes import Form, Shape, Sizes, shape_of
from bp_convert.kinds.speed import Counts
from bp_convert.kron.pairs import divisor_pairs
from bp_convert.layers.two_inputs import BPBilinear
from bp_convert.seen.pick import Pick, linear_rows


class BilinearKind(Kind):
    name = "Bilinear"
    twin = BPBilinear
    probed = False  # it takes two inputs
    priced_as = LinearKind.name  # a product with the outer product of the inputs

    def form(self, module: nn.Bilinear) -> Form:
        return Form(
            own={"out": module.out_features},
            inputs=((-1, module.in1_features),),
            sizes=lambda own, inp: Sizes(
                {"weight": (own["out"], inp[0], module.in2_features), "bias": (own["out"],)},
                {"out_features": own["out"], "in1_features": inp[0]},
                own["out"],
            ),
            base=self.base_of(module),
        )

    def widths(self, module: nn.Bilinear) -> Widths:
        shape = shape_of(module, "weight") or ()
        return (shape[1], shape[0]) if len(shape) == 3 else (
            module.in1_features, module.out_features,
        )  # fmt: skip

    def sizes(self, module: nn.Bilinear, widths: Widths) -> dict[str, Any]:
        return dict(zip(("in1_features", "out_features"), widths, strict=True))

    def factor(self, module: nn.Bilinear, widths: Widths, ask: Ask) -> Factors:
        return super().factor(module, _matrix(module, widths), ask)

    def choices(self, module: nn.Bilinear, widths: Widths) -> dict[str, Choices]:
        inputs, outputs = _matrix(module, widths)
        return {"weight": Choices(divisor_pairs(outputs), {(): divisor_pairs(inputs)})}

    def params(self, module: nn.Bilinear, widths: Widths, factors: Factors | None = None) -> int:
        return super().params(module, _matrix(module, widths), factors)

    def macs(
        self, module: nn.Bilinear, widths: Widths, factors: Factors, shapes: Sequence[Shape]
    ) -> int:
        one = BPBilinear.predict_macs(factors["weight"], (widths[0], module.in2_features))
        return sum(prod(shape[:-1]) for shape in shapes) * one

    def unseen_macs(self, module: nn.Bilinear, shape: Shape) -> int:
        return prod(shape[:-1]) * prod(_matrix(module, self.widths(module)))

    def operations(
        self, module: nn.Bilinear, widths: Widths, factors: Factors, shape: Shape
    ) -> tuple[Counts, Counts]:
        return matrix_counts(prod(shape[:-1]), _matrix(module, widths), factors["weight"])

    def empty_output(self, module: nn.Bilinear, x: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:-1], module.out_features)

    def shapes_only(self, module: nn.Bilinear) -> Forward:
        def forward(input1: Tensor, input2: Tensor) -> Tensor:
            require(input1.shape[-1], module.in1_features, "its first input")
            require(input2.shape[-1], module.in2_features, "its second input")
            return input1.new_empty(*input1.shape[:-1], module.out_features)

        return forward

    def examples(self, module: Any, name: str) -> Examples:
        return iter(())  # what the second input is, its width does not tell

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = args[0] if args else kwargs["input1"]
        return first, args[1] if len(args) > 1 else kwargs["input2"]

    def rows(self, module: nn.Bilinear, x: Any, pick: Pick) -> dict[str, list[Tensor]]:
        one, two = (linear_rows(part, pick) for part in x)  # the same of both
        return {"weight": [(one.unsqueeze(2) * two.unsqueeze(1)).flatten(1)]}


def _matrix(module: nn.Bilinear, widths: Widths) -> Widths:
    """Return the numbers of columns and rows of the matrix."""
    return widths[0] * module.in2_features, widths[1]
