"""nn.LSTM, nn.GRU and nn.RNN; and what their cells share with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bp_convert.errors import PlanError
from bp_convert.kinds.choices import Ask, Choices, Factors, Widths, matrix_factors, with_rank
from bp_convert.kinds.kind import STEPS, Examples, Kind, has_bias
from bp_convert.kinds.recurrent import Forward, recurrent_form, shapes_only
from bp_convert.kinds.shapes import Form, Shape, shape_of
from bp_convert.kinds.speed import Counts
from bp_convert.kinds.spread import Spread
from bp_convert.kron.contract import bilinear_macs
from bp_convert.kron.pairs import divisor_pairs
from bp_convert.kron.policies import paper_factors
from bp_convert.layers.lstm import BPLSTM
from bp_convert.layers.rnn import BPGRU, BPRNN
from bp_convert.recurrence.checks import groups, steps_and_batch
from bp_convert.recurrence.path_cost import prefers_factored, recurrent_macs
from bp_convert.recurrence.steps import Frame, GateMatrix, frame_of, named, projected
from bp_convert.seen.pick import Pick
from bp_convert.seen.recurrent_passes import Started, recurrent_rows, recurrent_weights, sides_of
from bp_convert.values.factors import FactorSpec
from bp_convert.values.settings import Pairs
from bp_convert.values.tensors import TensorSpec


class RecurrentKind(Kind):
    """What the kinds of stacks and of cells share: roles such as ``ih_l0``, or ``ih``."""

    several = True

    def frame(self, module: Any, widths: Widths | None = None) -> Frame:
        """Return the sizes of a module, at other widths where they are given."""
        own = frame_of(module)
        return own if widths is None else own.resized(*widths)

    def widths(self, module: Any) -> Widths:
        first = self.frame(module).suffixes()[0]
        ih, hh = (shape_of(module, named(f"weight_{part}", first)) or () for part in ("ih", "hh"))
        if len(ih) != 2 or len(hh) != 2:
            return module.input_size, self.frame(module).state
        return ih[1], hh[1]

    def factor(self, module: Any, widths: Widths, ask: Ask) -> Factors:
        matrices = self.frame(module, widths).matrices()
        return {role: self._spec(one, widths, ask) for role, one in matrices.items()}

    def _spec(self, one: GateMatrix, widths: Widths, ask: Ask) -> FactorSpec:
        size = one.inputs, one.outputs
        if not isinstance(ask.pairs, Pairs):
            return matrix_factors(size, ask)
        # `in` speaks of the layer's input; every matrix that reads hidden states uses `out`.
        (inputs, hidden), pair = widths, ask.pairs
        fits = pair.out[0] * pair.out[1] == hidden and pair.inp[0] * pair.inp[1] == inputs
        if not fits:
            raise PlanError(
                where=f"{self.name} {inputs} -> {hidden}",
                found=f"pairs out {pair.out}, in {pair.inp}",
                allowed=f"out with product {hidden}, in with product {inputs}",
                fix="give two factors of the hidden size and two of the input size",
            )
        own = paper_factors(*size, 1)
        out = pair.out if one.outputs == hidden else own.out
        inp = {inputs: pair.inp}.get(one.inputs) or {hidden: pair.out}.get(one.inputs) or own.inp
        return with_rank(FactorSpec(out=out, inp=inp), ask.rank, one.inputs * one.outputs)

    def choices(self, module: Any, widths: Widths) -> dict[str, Choices]:
        """Return the pairs of all gates in one matrix: at equal parameters, factors that the
        gates share reach further than a set for each."""
        return {
            role: Choices(divisor_pairs(one.gates * one.outputs), {(): divisor_pairs(one.inputs)})
            for role, one in self.frame(module, widths).matrices().items()
        }

    def matrices(
        self, module: Any, spread: Spread, factors: Factors | None = None
    ) -> dict[str, list[Tensor]]:
        """Return the matrices by role, (G*H, D) or, where factors are a gate's, (H, D) each; those
        of the reverse direction last."""
        wide = self.spread(module, spread)
        gates = self.frame(module).recurrence.gates
        found = {}
        for role in self.frame(module).matrices():
            ones = [wide[f"weight_{role}{side}"] for side in sides_of(module)]
            many = 1
            if factors is not None:
                own = 1 if role.startswith("hr") else gates
                many = groups(
                    factors[role], GateMatrix(own, ones[0].shape[1], ones[0].shape[0] // own)
                )
            found[role] = [part for one in ones for part in one.chunk(many)]
        return found

    @torch.no_grad()
    def add(self, module: Any, role: str, changes: Sequence[Tensor]) -> None:
        sides = sides_of(module)
        many = len(changes) // len(sides)
        for at, side in enumerate(sides):
            weight = getattr(module, f"weight_{role}{side}")
            weight.add_(torch.cat(list(changes[at * many : (at + 1) * many])).to(weight))

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = super().given(args, kwargs)
        hx = args[1] if len(args) > 1 else kwargs.get("hx")
        return x if hx is None else Started(x, hx)

    def rows(self, module: Any, x: Any, pick: Pick) -> dict[str, list[Tensor]]:
        return recurrent_rows(module, x, pick)

    def weights(self, module: Any, x: Any) -> dict[str, list[Tensor]]:
        return recurrent_weights(module, x)

    @torch.no_grad()
    def place(self, twin: Any, role: str, index: int, w1: Tensor, w2: Tensor) -> None:
        suffix, at = self._place(twin, role, index)
        for factor, value in zip(twin.pair(role[:2], suffix), (w1, w2), strict=True):
            factor[at].copy_(value)

    def _place(self, twin: Any, role: str, index: int) -> tuple[str, int]:
        """Return the suffix and the gate of the ``index``-th matrix of a role."""
        many = groups(twin.factors[role], twin.frame.matrices()[role])
        return role[3:] + ("_reverse" if index >= many else ""), index % many

    @torch.no_grad()
    def rest(self, module: Any, twin: Any, spread: Spread) -> None:
        if module.bias:
            wide = self.spread(module, spread)
            for suffix in twin.suffixes():
                ih, hh = (wide[named(f"bias_{part}", suffix)] for part in ("ih", "hh"))
                twin.bias_of(suffix).copy_(twin.recurrence.joined(ih, hh))

    def centred(self, module: Any, role: str) -> bool:
        return has_bias(module) and not role.startswith("hr")

    @torch.no_grad()
    def shift(self, twin: Any, role: str, index: int, change: Tensor) -> bool:
        if not self.centred(twin, role):
            return False
        suffix, at = self._place(twin, role, index)
        bias = twin.bias_of(suffix)
        both = bias.new_zeros(2, twin.recurrence.gates * twin.hidden_size)
        start = at * len(change)
        both[int(role.startswith("hh")), start : start + len(change)] = change.to(bias)
        bias.add_(twin.recurrence.joined(*both))
        return True

    def params(self, module: Any, widths: Widths, factors: Factors | None = None) -> int:
        frame = self.frame(module, widths)
        made = frame.recurrence
        # torch keeps two biases a gate; the twin one, and those that cannot be added up.
        rows = 2 * made.gates if factors is None else made.gates + made.inner
        biases = len(frame.suffixes()) * rows * frame.hidden if module.bias else 0
        weights = sum(
            one.gates * one.inputs * one.outputs
            if factors is None
            else groups(factors[role], one) * factors[role].params
            for role, one in frame.matrices().items()
        )
        return len(sides_of(module)) * weights + biases

    def output_norms(self, module: Any) -> Tensor | None:
        frame = self.frame(module)
        suffixes = frame.suffixes()
        if len(suffixes) > 1 or frame.proj:
            return None
        names = (named(f"weight_{part}", suffixes[0]) for part in ("ih", "hh"))
        rows = torch.cat([module.get_parameter(name) for name in names], 1)
        return rows.double().square().sum(1).view(frame.recurrence.gates, -1).sum(0)

    def spread(self, module: Any, spread: Spread) -> dict[str, Tensor]:
        """Return the weights and biases at the widened sizes, by torch's names."""
        first = self.frame(module).suffixes()[0]
        gates = self.frame(module).recurrence.gates
        state = module.get_parameter(named("weight_hh", first)).shape[1]
        hidden = module.get_parameter(named("weight_hh", first)).shape[0] // gates
        states = units = both = spread.outputs
        if states is not None and hidden != state:  # what a projection reads
            wide_hidden = projected(hidden, state, len(states))
            units = torch.arange(wide_hidden) * hidden // wide_hidden
        if states is not None and len(sides_of(module)) > 1:
            both = torch.cat([states, states + state])
        wide: dict[str, Tensor] = {}
        for name, parameter in module.named_parameters():
            if name.startswith("weight_hr"):
                wide[name] = Spread(units, states).columns(Spread(None, states).rows(parameter))
                continue
            stacked = parameter.view(gates, hidden, *parameter.shape[1:])  # (G, H, ...)
            outer = name.startswith(named("weight_ih", first))
            read = states if name.startswith("weight_hh") else spread.inputs if outer else both
            one = Spread(read, units)
            stacked = one.rows(stacked, axis=1)
            if name.startswith("weight"):
                stacked = one.columns(stacked, axis=2)
            wide[name] = stacked.flatten(0, 1)
        return wide


class StackKind(RecurrentKind):
    """What the kinds of stacks share."""

    def form(self, module: Any) -> Form:
        return recurrent_form(module, self.base_of(module))

    def batched(self, module: Any, shape: Shape, batch: int) -> Shape:
        if len(shape) == 2:
            return (batch, *shape) if module.batch_first else (shape[0], batch, shape[1])
        axis = 0 if module.batch_first else 1
        return (*shape[:axis], shape[axis] * batch, *shape[axis + 1 :])

    def macs(self, module: Any, widths: Widths, factors: Factors, shapes: Sequence[Shape]) -> int:
        directions, mode = len(sides_of(module)), self.frame(module).mode
        found = (steps_and_batch(shape, module.batch_first) for shape in shapes)
        return sum(recurrent_macs(factors, *sizes, directions, mode) for sizes in found)

    def operations(
        self, module: Any, widths: Widths, factors: Factors, shape: Shape
    ) -> tuple[Counts, Counts]:
        frame = self.frame(module, widths)
        steps, batch = steps_and_batch(shape, module.batch_first)
        passes, times = len(frame.suffixes()), len(sides_of(module))
        sizes = frame.matrices()
        numbers = {role: one.gates * one.inputs * one.outputs for role, one in sizes.items()}
        recurrent = times * sum(size for role, size in numbers.items() if role[0] == "h")
        dense: Counts = {
            "calls": 1,
            "steps": passes * steps,
            "read": steps * recurrent,
            "macs": steps * batch * times * sum(numbers.values()),
            "state": passes * steps * batch * frame.hidden,
        }
        if not prefers_factored(factors, steps, batch, frame.mode):
            return dense, dense  # runs as the dense layer on built weights
        cost = sum(
            groups(factors[role], one) * bilinear_macs(factors[role]) for role, one in sizes.items()
        )
        twin: Counts = {
            "loops": passes * steps,
            "products": steps * batch * times * cost,
            "states": passes * steps * batch * frame.hidden,
        }
        return dense, twin

    def empty_output(self, module: Any, x: Tensor) -> None:
        return None

    def shapes_only(self, module: nn.RNNBase) -> Forward:
        return shapes_only(module)

    def examples(self, module: nn.RNNBase, name: str) -> Examples:
        order = "" if module.batch_first else ", the batch on its second axis"
        words = f"{STEPS} steps of {module.input_size} features, from its first layer {name}{order}"
        yield TensorSpec(shape=(STEPS, module.input_size)), words


class LSTMKind(StackKind):
    name = "LSTM"
    twin = BPLSTM
    uncounted = True

    def sizes(self, module: Any, widths: Widths) -> dict[str, Any]:
        frame = self.frame(module, widths)
        names = ("input_size", "hidden_size", "proj_size")
        return dict(zip(names, (frame.inputs, frame.hidden, frame.proj), strict=True))


class GRUKind(StackKind):
    name = "GRU"
    twin: ClassVar[Any] = BPGRU


class RNNKind(StackKind):
    name = "RNN"
    twin: ClassVar[Any] = BPRNN
    alike = (nn.RNNBase,)
