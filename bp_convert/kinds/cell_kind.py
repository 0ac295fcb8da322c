"""nn.LSTMCell, nn.GRUCell and nn.RNNCell."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import Tensor, nn

from bp_convert.kinds.choices import Factors, Widths
from bp_convert.kinds.kind import Examples
from bp_convert.kinds.linear_kind import matrix_counts
from bp_convert.kinds.recurrent import Forward, cell_form, cell_shapes_only
from bp_convert.kinds.recurrent_kind import RecurrentKind
from bp_convert.kinds.shapes import Form, Shape
from bp_convert.kinds.speed import Counts
from bp_convert.layers.recurrent_cells import BilinearCell, BPGRUCell, BPLSTMCell, BPRNNCell
from bp_convert.recurrence.checks import groups
from bp_convert.values.tensors import TensorSpec


class CellKind(RecurrentKind):
    """What the kinds of cells share."""

    additive = True
    probed = False  # one step without a state does not show what it makes of one

    def form(self, module: Any) -> Form:
        return cell_form(module, self.base_of(module))

    def batched(self, module: Any, shape: Shape, batch: int) -> Shape:
        return (batch, *shape) if len(shape) == 1 else super().batched(module, shape, batch)

    def macs(self, module: Any, widths: Widths, factors: Factors, shapes: Sequence[Shape]) -> int:
        rows = sum(prod(shape[:-1]) for shape in shapes)
        return BilinearCell.predict_macs(factors, self.frame(module, widths).matrices(), rows)

    def operations(
        self, module: Any, widths: Widths, factors: Factors, shape: Shape
    ) -> tuple[Counts, Counts]:
        rows, frame = prod(shape[:-1]), self.frame(module, widths)
        dense: Counts = {"state": rows * frame.hidden * len(factors) / 2}
        twin: Counts = dict(dense)
        for role, spec in factors.items():
            one = frame.matrices()[role]
            many = groups(spec, one)
            counts = matrix_counts(rows, (one.inputs, one.gates * one.outputs // many), spec)
            for total, part in zip((dense, twin), counts, strict=True):
                for name, count in part.items():
                    total[name] = total.get(name, 0) + count * (1 if name == "calls" else many)
        return dense, twin

    def empty_output(self, module: Any, x: Tensor) -> Tensor | None:
        if self.frame(module).recurrence.carried > 1:
            return None
        return x.new_empty(*x.shape[:-1], module.hidden_size)

    def shapes_only(self, module: nn.RNNCellBase) -> Forward:
        return cell_shapes_only(module)

    def examples(self, module: Any, name: str) -> Examples:
        words = f"{module.input_size} features, from its first layer {name}"
        yield TensorSpec(shape=(module.input_size,)), words


class LSTMCellKind(CellKind):
    name = "LSTMCell"
    twin = BPLSTMCell


class GRUCellKind(CellKind):
    name = "GRUCell"
    twin = BPGRUCell


class RNNCellKind(CellKind):
    name = "RNNCell"
    twin = BPRNNCell
