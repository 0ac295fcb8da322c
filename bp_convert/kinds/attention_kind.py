"""nn.MultiheadAttention, whole: what goes in, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.errors import PlanError
from bp_convert.kinds.choices import Ask, Choices, Factors, Widths, matrix_factors, with_rank
from bp_convert.kinds.kind import STEPS, Examples, Kind
from bp_convert.kinds.linear_kind import LinearKind
from bp_convert.kinds.pick import Pick, linear_rows
from bp_convert.kinds.shapes import Dim, Form, Shape, Sizes, contradiction, shape_of
from bp_convert.kinds.speed import DENSE, Counts
from bp_convert.kinds.spread import Spread
from bp_convert.kron.contract import bilinear_macs
from bp_convert.kron.pairs import divisor_pairs
from bp_convert.kron.policies import paper_factors
from bp_convert.layers.attention import (
    BPMultiheadAttention,
    attention_fields,
    biases_of,
    extra_of,
    is_whole,
    matrices_of,
    widths_of,
)
from bp_convert.layers.attention_core import Masks, attend
from bp_convert.torch_private import has_one_width
from bp_convert.values.factors import FactorSpec
from bp_convert.values.settings import Pairs
from bp_convert.values.tensors import TensorSpec

CALLS = 4  # of a Linear: what torch's fused attention spares beside the products


@dataclass(frozen=True)
class Attended:
    """What a call is given, each sequence with its batch first."""

    query: Tensor  # (N, L, E)
    key: Tensor  # (N, S, kdim)
    value: Tensor
    masks: Masks
    alone: bool  # queries, keys and values are one tensor


class AttentionKind(Kind):
    name = "MultiheadAttention"
    twin = BPMultiheadAttention
    priced_as = LinearKind.name
    several = True
    separate = True
    follows = True
    probed = False
    parts = ("out_proj",)

    def form(self, module: nn.MultiheadAttention) -> Form:
        return attention_form(module)

    def refuse(self, module: nn.MultiheadAttention) -> str | None:
        out = module.out_proj
        if type(out).forward is not nn.Linear.forward or shape_of(out, "weight") is None:
            return f"its out_proj is a {type(out).__name__}"
        told = self.form(module).told().tensors
        inner = {name.removeprefix("out_proj."): size for name, size in told.items() if "." in name}
        return contradiction(module, told) or contradiction(out, inner)

    def not_widened(self, module: nn.MultiheadAttention) -> str | None:
        if has_one_width(module):
            return None
        return "its keys or values are of a width of their own: it follows, and stays dense"

    def widths(self, module: nn.MultiheadAttention) -> Widths:
        shape = shape_of(module.out_proj, "weight") or ()
        return (shape[1], shape[0]) if len(shape) == 2 else (module.embed_dim, module.embed_dim)

    # A call

    def given(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return _attended(module, *args, **kwargs)

    def call_shape(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Shape:
        """Return how many sequences, queries in each, and keys."""
        found = _attended(module, *args, **kwargs)
        return (len(found.query), found.query.shape[1], found.key.shape[1])

    def examples(self, module: nn.MultiheadAttention, name: str) -> Examples:
        order = "" if module.batch_first else ", the batch on its second axis"
        words = f"{STEPS} steps of {module.embed_dim} features, from its first layer {name}{order}"
        yield TensorSpec(shape=(STEPS, module.embed_dim)), words

    def empty_output(self, module: nn.MultiheadAttention, x: Tensor) -> None:
        return None

    # Factors

    def factor(self, module: nn.MultiheadAttention, widths: Widths, ask: Ask) -> Factors:
        sizes = _sizes(module, widths)
        return {role: self._spec(size, widths, ask) for role, size in sizes.items()}

    def _spec(self, size: Widths, widths: Widths, ask: Ask) -> FactorSpec:
        if not isinstance(ask.pairs, Pairs):
            return matrix_factors(size, ask)
        # `in` speaks of the queries; keys and values of another width take their nearest square.
        inputs, outputs, pair = size[0], size[1], ask.pairs
        if pair.out[0] * pair.out[1] != outputs or pair.inp[0] * pair.inp[1] != widths[0]:
            raise PlanError(
                where=f"{self.name} {widths[0]} -> {outputs}",
                found=f"pairs out {pair.out}, in {pair.inp}",
                allowed=f"out and in each with product {outputs}",
                fix="give two factors of the width twice",
            )
        inp = pair.inp if inputs == widths[0] else paper_factors(inputs, outputs, 1).inp
        return with_rank(FactorSpec(out=pair.out, inp=inp), ask.rank, inputs * outputs)

    def choices(self, module: nn.MultiheadAttention, widths: Widths) -> dict[str, Choices]:
        return {
            role: Choices(divisor_pairs(outputs), {(): divisor_pairs(inputs)})
            for role, (inputs, outputs) in _sizes(module, widths).items()
        }

    # Counts

    def params(
        self, module: nn.MultiheadAttention, widths: Widths, factors: Factors | None = None
    ) -> int:
        sizes, width = _sizes(module, widths), widths[1]
        weights = sum(
            inputs * outputs if factors is None or is_whole(factors[role]) else factors[role].params
            for role, (inputs, outputs) in sizes.items()
        )
        biases = 4 if module.in_proj_bias is not None else 0
        return weights + width * (biases + (0 if module.bias_k is None else 2))

    def macs(
        self,
        module: nn.MultiheadAttention,
        widths: Widths,
        factors: Factors,
        shapes: Sequence[Shape],
    ) -> int:
        total = 0
        sizes = _sizes(module, widths)
        for many, queries, keys in shapes:
            seen = keys + (module.bias_k is not None) + bool(module.add_zero_attn)
            total += 2 * many * queries * seen * widths[1]  # scores, and the mix of values
            for role, (inputs, outputs) in sizes.items():
                spec = factors[role]
                each = inputs * outputs if is_whole(spec) else bilinear_macs(spec)
                total += many * (keys if role in "kv" else queries) * each
        return total

    def operations(
        self, module: nn.MultiheadAttention, widths: Widths, factors: Factors, shape: Shape
    ) -> tuple[Counts, Counts]:
        """Count the projections; what lies between them takes both equally long."""
        many, queries, keys = shape
        dense: Counts = {}
        twin: Counts = {DENSE + "calls": CALLS}
        for role, size in _sizes(module, widths).items():
            rows = many * (keys if role in "kv" else queries)
            one = LinearKind().operations(module, size, {"weight": factors[role]}, (rows, size[0]))
            _add(dense, one[0])
            if is_whole(factors[role]):
                _add(twin, {DENSE + name: count for name, count in one[0].items()})
            else:
                _add(twin, one[1])
        dense["calls"] = 2 if has_one_width(module) else 4
        return dense, twin

    def output_norms(self, module: nn.MultiheadAttention) -> None:
        return None

    # The twin

    def build(
        self,
        module: nn.MultiheadAttention,
        widths: Widths,
        factors: Factors,
        device: torch.device | str,
    ) -> nn.Module:
        fields = {**attention_fields(module), "embed_dim": widths[0]}
        if has_one_width(module):
            fields.update(kdim=widths[0], vdim=widths[0])
        dtype = module.out_proj.weight.dtype
        return BPMultiheadAttention(**fields, factors=factors, device=device, dtype=dtype)

    def spread(self, module: nn.MultiheadAttention, spread: Spread) -> dict[str, Tensor]:
        """Return torch's tensors at the widened sizes. Every head grows; queries shrink by the
        root of what the heads grow by, of which the scores are scaled by the root alone."""
        tensors = {name: one.detach() for name, one in module.named_parameters()}
        if spread == Spread():
            return tensors
        wide = {}
        ratio = 1.0 if spread.outputs is None else len(spread.outputs) / module.embed_dim
        for role, matrix in matrices_of(tensors).items():
            inputs = spread.outputs if role == "out" else spread.inputs
            one = Spread(inputs, spread.outputs)
            wide[role] = one.columns(one.rows(matrix))
        found = {"out_proj.weight": wide["out"]}
        wide["q"] = wide["q"] * ratio**-0.5
        found["in_proj_weight"] = torch.cat([wide[role] for role in "qkv"])
        for role, bias in biases_of(tensors).items():
            wide[role] = spread.rows(bias)
        if "in_proj_bias" in tensors:
            wide["q"] = wide["q"] * ratio**-0.5
            found["in_proj_bias"] = torch.cat([wide[role] for role in "qkv"])
            found["out_proj.bias"] = wide["out"]
        for name in ("bias_k", "bias_v"):
            if name in tensors:
                found[name] = spread.rows(tensors[name], 2)
        return found

    @torch.no_grad()
    def place(
        self, twin: BPMultiheadAttention, role: str, index: int, w1: Tensor, w2: Tensor
    ) -> None:
        layer = twin.projection(role)
        if is_whole(twin.factors[role]):
            layer.weight.copy_((w1[0, 0, 0] * w2[0]).t())
        else:
            layer.w1.copy_(w1)
            layer.w2.copy_(w2)

    @torch.no_grad()
    def rest(
        self, module: nn.MultiheadAttention, twin: BPMultiheadAttention, spread: Spread
    ) -> None:
        twin.take_biases_(self.spread(module, spread))

    @torch.no_grad()
    def shift(self, twin: BPMultiheadAttention, role: str, index: int, change: Tensor) -> bool:
        if not twin.bias:
            return False
        bias = twin.projection(role).bias
        bias.add_(change.to(bias))
        return True

    def carry(self, module: Any, twin: Any) -> None:
        twin.adopt(module)

    # What the search for pairs and the fit to data see

    def matrices(
        self, module: nn.MultiheadAttention, spread: Spread, factors: Factors | None = None
    ) -> dict[str, list[Tensor]]:
        found = matrices_of(self.spread(module, spread))
        return {role: [matrix] for role, matrix in found.items()}

    @torch.no_grad()
    def add(self, module: nn.MultiheadAttention, role: str, changes: Sequence[Tensor]) -> None:
        weight = matrices_of(dict(module.named_parameters()))[role]
        weight.add_(changes[0].to(weight))

    def has_bias(self, module: nn.MultiheadAttention) -> bool:
        return module.in_proj_bias is not None

    @torch.no_grad()
    def add_bias(self, module: nn.MultiheadAttention, role: str, changes: Sequence[Tensor]) -> None:
        bias = biases_of(dict(module.named_parameters())).get(role)
        if bias is not None:
            bias.add_(changes[0].to(bias))

    @torch.no_grad()
    def rows(
        self, module: nn.MultiheadAttention, x: Attended, pick: Pick
    ) -> dict[str, list[Tensor]]:
        keys = _of_keys(x, pick)
        queries = keys if x.alone else pick
        tensors = dict(module.named_parameters())
        weights, biases = matrices_of(tensors), biases_of(tensors)
        given = {"q": (x.query, queries), "k": (x.key, keys), "v": (x.value, keys)}
        q, k, v = (
            nn.functional.linear(rows, weights[role], biases.get(role))
            for role, (rows, _) in given.items()
        )
        mixed, _ = attend(
            q, k, v, module.num_heads, x.masks, extra=extra_of(module), zero=module.add_zero_attn
        )
        given["out"] = (mixed, queries)
        return {role: [linear_rows(rows, which)] for role, (rows, which) in given.items()}


def attention_form(m: Any) -> Form:
    """Return the form of torch's attention: heads stay, each head grows; keys and values of other
    widths than the queries' may differ."""
    same = has_one_width(m)
    own = {"head": m.head_dim} | ({} if same else {"keys": m.kdim, "values": m.vdim})

    def sizes(own: Mapping[str, Dim], inp: Sequence[Dim]) -> Sizes:
        width = own["head"] * m.num_heads
        keys, values = own.get("keys", width), own.get("values", width)
        return Sizes(
            {
                "in_proj_weight": (3 * width, width),
                "q_proj_weight": (width, width),
                "k_proj_weight": (width, keys),
                "v_proj_weight": (width, values),
                "in_proj_bias": (3 * width,),
                "bias_k": (1, 1, width),
                "bias_v": (1, 1, width),
                "out_proj.weight": (width, width),
                "out_proj.bias": (width,),
            },
            {
                "embed_dim": width,
                "head_dim": own["head"],
                "kdim": keys,
                "vdim": values,
                "out_proj.in_features": width,
                "out_proj.out_features": width,
            },
            width,
        )

    return Form(own, (), sizes, nn.MultiheadAttention)


def _sizes(module: nn.MultiheadAttention, widths: Widths) -> dict[str, Widths]:
    """Return the (inputs, outputs) of each projection, by role."""
    one = has_one_width(module)
    return {
        role: (widths[0] if one or role in ("q", "out") else inputs, widths[1])
        for role, inputs in widths_of(module).items()
    }


def _attended(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Attended:
    """Read a call of attention."""
    masks = Masks.of(
        query, attn_mask, key_padding_mask, is_causal=is_causal, need_weights=need_weights
    )
    alone = query is key is value
    given = (query, key, value)
    if query.dim() == 2:
        query, key, value = (one.unsqueeze(0) for one in given)
    elif not module.batch_first:
        query, key, value = (one.transpose(0, 1) for one in given)
    return Attended(query, key, value, masks, alone)


def _of_keys(x: Attended, pick: Pick) -> Pick:
    """Leave keys out that are padding."""
    pads = x.masks.keys
    if pads is None:
        return pick
    counts = pads != float("-inf")  # (N, S)
    if pick.mask is not None and pick.mask.shape == counts.shape:
        counts = counts & pick.mask.to(counts.device, torch.bool)
    return replace(pick, mask=counts)


def _add(total: Counts, more: Counts) -> None:
    for name, count in more.items():
        total[name] = total.get(name, 0) + count
