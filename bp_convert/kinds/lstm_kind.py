"""nn.LSTM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.errors import PlanError
from bp_convert.kinds.choices import Ask, Choices, Factors, Widths, matrix_factors, with_rank
from bp_convert.kinds.kind import STEPS, Examples, Kind
from bp_convert.kinds.lstm_passes import lstm_rows, lstm_weights, sides_of
from bp_convert.kinds.pick import Pick
from bp_convert.kinds.recurrent import Forward, recurrent_form, shapes_only
from bp_convert.kinds.shapes import Form, Shape, shape_of
from bp_convert.kinds.speed import Counts
from bp_convert.kinds.spread import Spread
from bp_convert.kron.contract import bilinear_macs
from bp_convert.kron.pairs import divisor_pairs
from bp_convert.kron.policies import paper_factors
from bp_convert.layers.lstm import BPLSTM
from bp_convert.layers.lstm_checks import GATES, gate_sizes, groups, steps_and_batch
from bp_convert.layers.lstm_cost import prefers_factored
from bp_convert.values.factors import FactorSpec
from bp_convert.values.settings import Pairs
from bp_convert.values.tensors import TensorSpec


class LSTMKind(Kind):
    name = "LSTM"
    twin = BPLSTM
    alike = (nn.GRU, nn.RNN, nn.RNNBase)
    uncounted = True
    several = True

    def form(self, module: nn.LSTM) -> Form:
        return recurrent_form(module, self.base_of(module))

    def refuse(self, module: nn.LSTM) -> str | None:
        if module.proj_size:
            return f"proj_size={module.proj_size} (projected LSTM)"
        return super().refuse(module)

    def widths(self, module: nn.LSTM) -> Widths:
        shape = shape_of(module, "weight_ih_l0") or ()
        if len(shape) != 2:
            return module.input_size, module.hidden_size
        return shape[1], shape[0] // GATES

    def factor(self, module: nn.LSTM, widths: Widths, ask: Ask) -> Factors:
        return {
            role: self._spec(size, widths, ask) for role, size in _sizes(module, widths).items()
        }

    def _spec(self, size: Widths, widths: Widths, ask: Ask) -> FactorSpec:
        if not isinstance(ask.pairs, Pairs):
            return matrix_factors(size, ask)
        # `in` speaks of the layer's input; every matrix that reads hidden states uses `out`.
        (inputs, hidden), pair = size, ask.pairs
        fits = pair.out[0] * pair.out[1] == hidden and pair.inp[0] * pair.inp[1] == widths[0]
        if not fits:
            raise PlanError(
                where=f"LSTM {widths[0]} -> {hidden}",
                found=f"pairs out {pair.out}, in {pair.inp}",
                allowed=f"out with product {hidden}, in with product {widths[0]}",
                fix="give two factors of the hidden size and two of the input size",
            )
        own = paper_factors(inputs, hidden, 1).inp
        inp = pair.inp if inputs == widths[0] else pair.out if inputs == hidden else own
        return with_rank(FactorSpec(out=pair.out, inp=inp), ask.rank, inputs * hidden)

    def choices(self, module: nn.LSTM, widths: Widths) -> dict[str, Choices]:
        """Return the pairs of the four gates in one matrix: at equal parameters, factors that
        the gates share reach further than a set for each."""
        return {
            role: Choices(divisor_pairs(GATES * outputs), {(): divisor_pairs(inputs)})
            for role, (inputs, outputs) in _sizes(module, widths).items()
        }

    def matrices(
        self, module: nn.LSTM, spread: Spread, factors: Factors | None = None
    ) -> dict[str, list[Tensor]]:
        """Return the matrices by role, (4H, D) or, where factors are a gate's, (H, D) each; those
        of the reverse direction last."""
        wide = self.spread(module, spread)
        roles = [name.removeprefix("weight_") for name in wide if name.startswith("weight_")]
        found = {}
        for role in roles:
            if role.endswith("_reverse"):
                continue
            ones = [wide[f"weight_{role}{side}"] for side in sides_of(module)]
            many = 1
            if factors is not None:
                many = groups(factors[role], ones[0].shape[0] // GATES)
            found[role] = [part for one in ones for part in one.chunk(many)]
        return found

    @torch.no_grad()
    def add(self, module: nn.LSTM, role: str, changes: Sequence[Tensor]) -> None:
        sides = sides_of(module)
        many = len(changes) // len(sides)
        for at, side in enumerate(sides):
            weight = getattr(module, f"weight_{role}{side}")
            weight.add_(torch.cat(list(changes[at * many : (at + 1) * many])).to(weight))

    def batched(self, module: nn.LSTM, shape: Shape, batch: int) -> Shape:
        if len(shape) == 2:
            return (batch, *shape) if module.batch_first else (shape[0], batch, shape[1])
        axis = 0 if module.batch_first else 1
        return (*shape[:axis], shape[axis] * batch, *shape[axis + 1 :])

    def rows(self, module: nn.LSTM, x: Any, pick: Pick) -> dict[str, list[Tensor]]:
        return lstm_rows(module, x, pick)

    def weights(self, module: nn.LSTM, x: Any) -> dict[str, list[Tensor]]:
        return lstm_weights(module, x)

    @torch.no_grad()
    def place(self, twin: BPLSTM, role: str, index: int, w1: Tensor, w2: Tensor) -> None:
        many = groups(twin.factors[role], twin.hidden_size)
        side = "_reverse" if index >= many else ""
        getattr(twin, f"w1_{role}{side}")[index % many].copy_(w1)
        getattr(twin, f"w2_{role}{side}")[index % many].copy_(w2)

    @torch.no_grad()
    def rest(self, module: nn.LSTM, twin: BPLSTM, spread: Spread) -> None:
        if module.bias:
            wide = self.spread(module, spread)
            for name, parameter in twin.named_parameters():
                if name.startswith("bias_"):
                    suffix = name.removeprefix("bias_")
                    parameter.copy_(wide[f"bias_ih_{suffix}"] + wide[f"bias_hh_{suffix}"])

    @torch.no_grad()
    def shift(self, twin: BPLSTM, role: str, index: int, change: Tensor) -> bool:
        if not twin.bias:
            return False
        many = groups(twin.factors[role], twin.hidden_size)
        suffix = role[3:] + ("_reverse" if index >= many else "")
        bias = getattr(twin, f"bias_{suffix}").view(many, -1)
        bias[index % many].add_(change.to(bias))
        return True

    def params(self, module: nn.LSTM, widths: Widths, factors: Factors | None = None) -> int:
        hidden = widths[1]
        directions = 2 if module.bidirectional else 1
        # torch keeps two biases a gate, the paper and the twin one.
        biases = (2 if factors is None else 1) * hidden * module.num_layers if module.bias else 0
        weights = sum(
            GATES * size[0] * size[1]
            if factors is None
            else groups(factors[role], hidden) * factors[role].params
            for role, size in _sizes(module, widths).items()
        )
        return directions * (weights + GATES * biases)

    def macs(
        self, module: nn.LSTM, widths: Widths, factors: Factors, shapes: Sequence[Shape]
    ) -> int:
        inputs, _ = widths
        twin: Any = self.build(module, widths, factors, "meta")
        return sum(twin.predict_macs((*shape[:-1], inputs)) for shape in shapes)

    def operations(
        self, module: nn.LSTM, widths: Widths, factors: Factors, shape: Shape
    ) -> tuple[Counts, Counts]:
        hidden = widths[1]
        steps, batch = steps_and_batch(shape, module.batch_first)
        sides = module.num_layers * (2 if module.bidirectional else 1)
        sizes = _sizes(module, widths)
        times = sides // module.num_layers
        recurrent = sides * GATES * hidden * hidden
        inputs = times * GATES * sum(d * k for role, (d, k) in sizes.items() if role[0] == "i")
        dense: Counts = {
            "calls": 1,
            "steps": sides * steps,
            "read": steps * recurrent,
            "macs": steps * batch * (recurrent + inputs),
            "state": sides * steps * batch * hidden,
        }
        if not prefers_factored(factors, steps, batch):
            return dense, dense  # runs as the dense layer on built weights
        specs = [factors[role] for role in sizes]
        cost = times * sum(groups(spec, hidden) * bilinear_macs(spec) for spec in specs)
        twin: Counts = {
            "loops": sides * steps,
            "products": steps * batch * cost,
            "states": sides * steps * batch * hidden,
        }
        return dense, twin

    def empty_output(self, module: nn.LSTM, x: Tensor) -> None:
        return None

    def shapes_only(self, module: nn.RNNBase) -> Forward:
        return shapes_only(module)

    def examples(self, module: nn.RNNBase, name: str) -> Examples:
        order = "" if module.batch_first else ", the batch on its second axis"
        words = f"{STEPS} steps of {module.input_size} features, from its first layer {name}{order}"
        yield TensorSpec(shape=(STEPS, module.input_size)), words

    def output_norms(self, module: nn.LSTM) -> Tensor | None:
        if module.num_layers > 1 or module.bidirectional or module.proj_size:
            return None
        rows = torch.cat([module.get_parameter(f"weight_{of}_l0") for of in ("ih", "hh")], 1)
        gates = rows.double().square().sum(1).view(GATES, module.hidden_size)
        return gates.sum(0)

    def spread(self, module: nn.LSTM, spread: Spread) -> dict[str, Tensor]:
        """Return the LSTM's weights and biases at the widened sizes, by torch's names."""
        hidden = next(module.parameters()).shape[0] // GATES
        states = both = spread.outputs
        if states is not None and module.bidirectional:
            both = torch.cat([states, states + hidden])
        wide: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            gates = parameter.view(GATES, hidden, *parameter.shape[1:])  # (4, H, ...)
            first = spread.inputs if name.startswith("weight_ih_l0") else both
            one = Spread(states if name.startswith("weight_hh") else first, states)
            gates = one.rows(gates, axis=1)
            if name.startswith("weight"):
                gates = one.columns(gates, axis=2)
            wide[name] = gates.flatten(0, 1)
        return wide


def _sizes(module: nn.LSTM, widths: Widths) -> dict[str, Widths]:
    both = module.bidirectional
    return gate_sizes(*widths, num_layers=module.num_layers, bidirectional=both)
