"""nn.MultiheadAttention, whole: what goes in, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.attention.attention import (
    BPMultiheadAttention,
    attention_fields,
    biases_of,
    is_whole,
    matrices_of,
    packed,
    widths_of,
)
from bp_convert.kinds.choices import (
    Ask,
    Choices,
    Factors,
    Widths,
    matrix_factors,
    named_pairs,
    with_rank,
)
from bp_convert.kinds.kind import STEPS, Examples, Kind
from bp_convert.kinds.linear_kind import LinearKind, matrix_counts
from bp_convert.kinds.shapes import Dim, Form, Shape, Sizes, contradiction, shape_of
from bp_convert.kinds.speed import DENSE, Counts
from bp_convert.kinds.spread import Spread
from bp_convert.kron.contract import bilinear_macs
from bp_convert.kron.pairs import divisor_pairs
from bp_convert.kron.policies import paper_factors
from bp_convert.seen.attended import Attended
from bp_convert.seen.pick import Pick, linear_rows
from bp_convert.torch_private import has_one_width
from bp_convert.values.factors import FactorSpec
from bp_convert.values.settings import Pairs
from bp_convert.values.tensors import TensorSpec

CALLS = 4  # of a Linear: what torch's fused attention spares beside the products


class AttentionKind(Kind):
    name = "MultiheadAttention"
    twin = BPMultiheadAttention
    priced_as = LinearKind.name
    several = True
    additive = True
    follows = True
    probed = False
    parts = ("out_proj",)

    def form(self, module: Any) -> Form:
        return attention_form(module)

    def refuse(self, module: Any) -> str | None:
        out = module.out_proj
        if type(out).forward is not nn.Linear.forward or shape_of(out, "weight") is None:
            return f"its out_proj is a {type(out).__name__}"
        told = self.form(module).told().tensors
        inner = {name.removeprefix("out_proj."): size for name, size in told.items() if "." in name}
        return contradiction(module, told) or contradiction(out, inner)

    def read(self, module: Any) -> dict[str, Any]:
        return attention_fields(module)

    def not_widened(self, module: Any) -> str | None:
        if has_one_width(module):
            return None
        return "its keys or values are of a width of their own: it follows, and stays dense"

    def widths(self, module: Any) -> Widths:
        shape = shape_of(module.out_proj, "weight") or ()
        return (shape[1], shape[0]) if len(shape) == 2 else (module.embed_dim, module.embed_dim)

    # A call

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return Attended.of(*args, **kwargs)

    def call_shape(self, module: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Shape:
        """Return how many sequences, queries in each, and keys."""
        found = Attended.of(*args, **kwargs).batch_first(module)
        return (len(found.query), found.query.shape[1], found.key.shape[1])

    def examples(self, module: Any, name: str) -> Examples:
        order = "" if module.batch_first else ", the batch on its second axis"
        words = f"{STEPS} steps of {module.embed_dim} features, from its first layer {name}{order}"
        yield TensorSpec(shape=(STEPS, module.embed_dim)), words

    # Factors

    def factor(self, module: Any, widths: Widths, ask: Ask) -> Factors:
        sizes = _sizes(module, widths)
        return {role: self._spec(size, widths, ask) for role, size in sizes.items()}

    def _spec(self, size: Widths, widths: Widths, ask: Ask) -> FactorSpec:
        if not isinstance(ask.pairs, Pairs):
            return matrix_factors(size, ask)
        # `in` speaks of the queries; keys and values of another width take their nearest square.
        inputs, outputs = size
        spec = named_pairs(self.name, ask.pairs, (widths[0], outputs))
        if inputs != widths[0]:
            spec = FactorSpec(out=spec.out, inp=paper_factors(inputs, outputs, 1).inp)
        return with_rank(spec, ask.rank, inputs * outputs)

    def choices(self, module: Any, widths: Widths) -> dict[str, Choices]:
        return {
            role: Choices(divisor_pairs(outputs), {(): divisor_pairs(inputs)})
            for role, (inputs, outputs) in _sizes(module, widths).items()
        }

    # Counts

    def params(self, module: Any, widths: Widths, factors: Factors | None = None) -> int:
        sizes, width = _sizes(module, widths), widths[1]
        weights = sum(
            inputs * outputs if factors is None or is_whole(factors[role]) else factors[role].params
            for role, (inputs, outputs) in sizes.items()
        )
        biases = 4 if module.in_proj_bias is not None else 0
        return weights + width * (biases + (0 if module.bias_k is None else 2))

    def macs(self, module: Any, widths: Widths, factors: Factors, shapes: Sequence[Shape]) -> int:
        total = 0
        sizes = _sizes(module, widths)
        for many, queries, keys in shapes:
            seen = keys + (module.bias_k is not None) + bool(module.add_zero_attn)
            between = 2 * many * queries * seen * widths[1]  # scores, and the mix of values
            total += (
                between
                * sum(sizes[role][0] for role in factors)
                // sum(inputs for inputs, _ in sizes.values())
            )
            for role, spec in factors.items():
                each = prod(sizes[role]) if is_whole(spec) else bilinear_macs(spec)
                total += many * (keys if role in "kv" else queries) * each
        return total

    def operations(
        self, module: Any, widths: Widths, factors: Factors, shape: Shape
    ) -> tuple[Counts, Counts]:
        """Count the projections; what lies between them takes both equally long."""
        many, queries, keys = shape
        sizes, part = _sizes(module, widths), len(factors) / 4
        dense: Counts = {}
        twin: Counts = {DENSE + "calls": CALLS * part}
        for role, spec in factors.items():
            rows = many * (keys if role in "kv" else queries)
            one, other = matrix_counts(rows, sizes[role], spec)
            _add(dense, one)
            whole = is_whole(spec)
            _add(twin, {DENSE + name: count for name, count in one.items()} if whole else other)
        dense["calls"] = (2 if has_one_width(module) else 4) * part
        return dense, twin

    def output_norms(self, module: Any) -> None:
        return None

    # The twin

    def build(
        self, module: Any, widths: Widths, factors: Factors, device: torch.device | str
    ) -> nn.Module:
        fields = {**attention_fields(module), "embed_dim": widths[0]}
        if has_one_width(module):
            fields.update(kdim=widths[0], vdim=widths[0])
        dtype = module.out_proj.weight.dtype
        return BPMultiheadAttention(**fields, factors=factors, device=device, dtype=dtype)

    def spread(self, module: Any, spread: Spread) -> dict[str, Tensor]:
        """Return torch's tensors at the widened sizes. Every head grows; queries shrink by the
        root of what the heads grow by, of which the scores are scaled by the root alone."""
        tensors = {name: one.detach() for name, one in module.named_parameters()}
        if spread == Spread():
            return tensors
        ratio = 1.0 if spread.outputs is None else len(spread.outputs) / module.embed_dim
        weights, biases = matrices_of(tensors), biases_of(tensors)
        for role, matrix in weights.items():
            inputs = spread.outputs if role == "out" else spread.inputs
            weights[role] = spread.rows(Spread(inputs).columns(matrix))
        biases = {role: spread.rows(bias) for role, bias in biases.items()}
        for wide in filter(None, (weights, biases)):
            wide["q"] = wide["q"] * ratio**-0.5
        extra = {n: spread.rows(t, 2) for n, t in tensors.items() if n in ("bias_k", "bias_v")}
        return {**packed(weights, biases), **extra}

    @torch.no_grad()
    def place(self, twin: Any, role: str, index: int, w1: Tensor, w2: Tensor) -> None:
        layer = twin.projection(role)
        if is_whole(twin.factors[role]):
            layer.weight.copy_((w1[0, 0, 0] * w2[0]).t())
        else:
            layer.w1.copy_(w1)
            layer.w2.copy_(w2)

    @torch.no_grad()
    def rest(self, module: Any, twin: Any, spread: Spread) -> None:
        twin.take_biases_(self.spread(module, spread))

    @torch.no_grad()
    def shift(self, twin: Any, role: str, index: int, change: Tensor) -> bool:
        if not twin.bias:
            return False
        bias = twin.projection(role).bias
        bias.add_(change.to(bias))
        return True

    def carry(self, module: Any, twin: Any) -> None:
        twin.adopt(module)

    # What the search for pairs and the fit to data see

    def matrices(
        self, module: Any, spread: Spread, factors: Factors | None = None
    ) -> dict[str, list[Tensor]]:
        found = matrices_of(self.spread(module, spread))
        return {role: [matrix] for role, matrix in found.items()}

    @torch.no_grad()
    def add(self, module: Any, role: str, changes: Sequence[Tensor]) -> None:
        weight = matrices_of(dict(module.named_parameters()))[role]
        weight.add_(changes[0].to(weight))

    def centred(self, module: Any, role: str) -> bool:
        return module.in_proj_bias is not None

    @torch.no_grad()
    def add_bias(self, module: Any, role: str, changes: Sequence[Tensor]) -> None:
        bias = biases_of(dict(module.named_parameters())).get(role)
        if bias is not None:
            bias.add_(changes[0].to(bias))

    @torch.no_grad()
    def rows(self, module: Any, x: Attended, pick: Pick) -> dict[str, list[Tensor]]:
        x = x.batch_first(module)
        counts, all_keys = x.counts, pick
        if counts is not None:
            if pick.mask is not None and pick.mask.shape == counts.shape:
                counts = counts & pick.mask.to(counts.device, torch.bool)
            all_keys = replace(pick, mask=counts)
        seen = x.seen(module)
        return {
            role: [linear_rows(rows, all_keys if keys else pick)]
            for role, (rows, keys) in seen.items()
        }


def attention_form(m: Any) -> Form:
    """Return the form of torch's attention: heads stay, each head grows; keys and values of other
    widths than the queries' may differ."""
    same = has_one_width(m)
    own = {"head": m.head_dim} | ({} if same else {"keys": m.kdim, "values": m.vdim})

    def sizes(own: Mapping[str, Dim], inp: Sequence[Dim]) -> Sizes:
        width = own["head"] * m.num_heads
        keys, values = own.get("keys", width), own.get("values", width)
        read = zip("qkv", (width, keys, values), strict=True)
        inner: dict[str, tuple[Dim, ...]] = {f"{one}_proj_weight": (width, n) for one, n in read}
        inner |= {"in_proj_weight": (3 * width, width), "in_proj_bias": (3 * width,)}
        inner |= {"out_proj.weight": (width, width), "out_proj.bias": (width,)}
        inner |= dict.fromkeys(("bias_k", "bias_v"), (1, 1, width))
        names = ("embed_dim", "out_proj.in_features", "out_proj.out_features")
        attrs = {**dict.fromkeys(names, width), "kdim": keys, "vdim": values}
        return Sizes(inner, {**attrs, "head_dim": own["head"]}, width)

    return Form(own, (), sizes, nn.MultiheadAttention)


def _sizes(module: Any, widths: Widths) -> dict[str, Widths]:
    """Return the (inputs, outputs) of each projection, by role."""
    one = has_one_width(module)
    return {
        role: (widths[0] if one or role in ("q", "out") else inputs, widths[1])
        for role, inputs in widths_of(module).items()
    }


def _add(total: Counts, more: Counts) -> None:
    for name, count in more.items():
        total[name] = total.get(name, 0) + count
