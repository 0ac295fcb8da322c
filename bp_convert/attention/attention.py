"""Multi-head attention whose projections are sums of Kronecker products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import Self

from bp_convert.attention.attention_core import Masks, attend
from bp_convert.errors import FactorError
from bp_convert.fields.carry import blank
from bp_convert.kron.fits import checked
from bp_convert.kron.policies import paper_factors
from bp_convert.layers.common import init_factors_
from bp_convert.layers.linear import BPLinear
from bp_convert.torch_private import without_fused_path
from bp_convert.values.factors import FactorSpec
from bp_convert.values.plan import Way

ROLES = ("q", "k", "v", "out")


class BPMultiheadAttention(nn.Module):
    """An ``nn.MultiheadAttention`` whose four projections are ``BPLinear`` layers: ``q_proj``,
    ``k_proj``, ``v_proj`` and ``out_proj``.

    A projection whose factors are a weight left whole, (1, K) with (1, D), is an ``nn.Linear``.
    Torch's names of dense weights can be read, and are built at each access; its fused encoder
    path, which would read them, is not taken.

    Args: as ``nn.MultiheadAttention``, and
        factors: one FactorSpec per projection: ``q``, ``k``, ``v``, ``out``; by default the
            nearest-square pairs.
        rank: number of terms R where ``factors`` is not given; cut to full rank.

    Shape:
        query (L, N, E), key (S, N, kdim), value (S, N, vdim), (N, ., .) with ``batch_first``,
        without N for one sequence, or nested for self-attention; results as torch's.

    Raises:
        FactorError: heads that do not divide the width, or pairs that do not fit.
    """

    FIELDS: ClassVar = (  # the width first
        *("embed_dim", "num_heads", "dropout", "bias", "add_bias_kv", "add_zero_attn"),
        *("kdim", "vdim", "batch_first"),
    )
    DENSE: ClassVar = nn.MultiheadAttention
    EXPANDS: ClassVar = True

    q_proj: BPLinear | nn.Linear
    k_proj: BPLinear | nn.Linear
    v_proj: BPLinear | nn.Linear
    out_proj: BPLinear | nn.Linear
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        *,
        factors: Mapping[str, FactorSpec] | None = None,
        rank: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise FactorError(
                where="BPMultiheadAttention",
                found=f"{num_heads} heads in a width of {embed_dim}",
                allowed="heads that divide the width",
                fix="give another number of heads",
            )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout = dropout
        self.add_zero_attn = add_zero_attn
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.batch_first = batch_first
        without_fused_path(self)
        where: Any = {"device": device, "dtype": dtype}
        self.factors: dict[str, FactorSpec] = {}
        for role, inputs in widths_of(self).items():
            spec = _given(factors, role) or paper_factors(inputs, embed_dim, rank)
            name = f"BPMultiheadAttention, {role}"
            spec = self.factors[role] = checked(name, spec, inputs=inputs, outputs=embed_dim)
            made: nn.Module
            if is_whole(spec):
                made = nn.Linear(inputs, embed_dim, bias, **where)
            else:
                made = BPLinear(inputs, embed_dim, bias, factors=spec, **where)
            setattr(self, f"{role}_proj", made)
        for name in ("bias_k", "bias_v"):
            one = nn.Parameter(torch.empty(1, 1, embed_dim, **where)) if add_bias_kv else None
            self.register_parameter(name, one)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw factors so that weights vary as a fresh ``nn.MultiheadAttention``'s: Xavier's for
        what goes in, of the three matrices in one where they are; biases are zero."""
        self.out_proj.reset_parameters()
        times = 3 if self.packed else 1
        for role, inputs in widths_of(self).items():
            layer = self.projection(role)
            if role != "out":
                variance = 2 / (inputs + times * self.embed_dim)
                if isinstance(layer, BPLinear):
                    init_factors_(layer.w1, layer.w2, layer.factors.rank, variance)
                else:
                    nn.init.normal_(layer.weight, std=variance**0.5)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        for one in (self.bias_k, self.bias_v):
            if one is not None:
                nn.init.xavier_normal_(one)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return (output, weights) as ``nn.MultiheadAttention`` does."""
        if query.is_nested:
            if key is not query or value is not query or attn_mask is not None:
                raise ValueError("nested: one tensor for query, key and value, and no mask")
            if key_padding_mask is not None:
                raise ValueError("nested: sequences have their own lengths, and no padding")
            return self._nested(query, need_weights, average_attn_weights)
        if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
            shapes = ", ".join(str(tuple(one.shape)) for one in (query, key, value))
            raise ValueError(f"query, key and value: 2 axes each, or 3, are taken, not {shapes}")
        masks = Masks.of(
            query, attn_mask, key_padding_mask, is_causal=is_causal, need_weights=need_weights
        )
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        single, turned = query.dim() == 2, query.dim() == 3 and not self.batch_first
        if single:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        elif turned:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        mixed, weights = self._attend(q, k, v, masks, need_weights)
        y = self.out_proj(mixed.squeeze(0) if single else mixed.transpose(0, 1))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)  # over the heads
        if weights is not None and single:
            weights = weights.squeeze(0)
        return y if single or turned else y.transpose(0, 1), weights

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, masks: Masks, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        return attend(
            q, k, v, self.num_heads, masks, extra=extra_of(self), zero=self.add_zero_attn,
            dropout=self.dropout if self.training else 0.0, need_weights=need_weights,
        )  # fmt: skip

    def _nested(
        self, query: Tensor, need_weights: bool, average: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Attend within each sequence (T_n, E); projections see all of them at once."""
        parts = query.unbind()
        sizes = [len(one) for one in parts]
        rows = torch.cat(parts)  # (sum of T_n, E)
        q, k, v = (
            pad_sequence(list(torch.split(layer(rows), sizes)), batch_first=True)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        steps = torch.arange(q.shape[1], device=q.device)
        pads = steps >= torch.tensor(sizes, device=q.device)[:, None]  # (N, T)
        masks = Masks.of(rows, None, pads, is_causal=False, need_weights=need_weights)
        mixed, weights = self._attend(q, k, v, masks, need_weights)
        y = self.out_proj(mixed[~pads])
        if weights is not None:
            weights = weights.masked_fill(pads[:, None, :, None], 0.0)
            weights = weights.mean(1) if average else weights
        made = torch.nested.as_nested_tensor(list(torch.split(y, sizes)), layout=query.layout)
        return made, weights

    # Dense and back

    @classmethod
    def from_dense(
        cls,
        layer: nn.MultiheadAttention,
        *,
        factors: Mapping[str, FactorSpec] | None = None,
        rank: int = 1,
    ) -> Self:
        """Return the nearest bilinear attention to a trained one; nothing is shared with it.

        Raises:
            FactorError: pairs that do not fit, or weights that are not finite.
        """
        like: Any = layer.out_proj.weight
        new = cls(
            **attention_fields(layer),
            factors=factors,
            rank=rank,
            device=like.device,
            dtype=like.dtype,
        )
        tensors = dict(layer.named_parameters())
        new.fit_(tensors)
        new.take_biases_(tensors)
        return new.adopt(layer)

    @torch.no_grad()
    def fit_(self, weights: Mapping[str, Tensor]) -> float:
        """Set the factors to the nearest Kronecker sums.

        Args:
            weights: by torch's names, ``in_proj_weight`` (3E, E), ``out_proj.weight`` (E, E), ...

        Returns:
            The relative Frobenius error over all matrices.
        """
        gap = total = 0.0
        for role, matrix in matrices_of(weights).items():
            layer = self.projection(role)
            size = float(torch.linalg.vector_norm(matrix, dtype=torch.float64)) ** 2
            total += size
            if isinstance(layer, BPLinear):
                gap += layer.fit_(matrix) ** 2 * size
            else:
                layer.weight.copy_(matrix)
        return float(gap / total) ** 0.5 if total else 0.0

    @torch.no_grad()
    def take_biases_(self, tensors: Mapping[str, Tensor]) -> None:
        """Set everything but the weights, by torch's names."""
        for role, bias in biases_of(tensors).items():
            self.projection(role).bias.copy_(bias)
        for name in ("bias_k", "bias_v"):
            if getattr(self, name) is not None:
                getattr(self, name).copy_(tensors[name])

    def adopt(self, layer: nn.MultiheadAttention) -> Self:
        """Take over which parameters are trained, and the training flag."""
        trained = {name: one.requires_grad for name, one in layer.named_parameters()}
        for role in ROLES:
            weight, bias = (_dense_name(role, what, trained) for what in ("weight", "bias"))
            for name, parameter in self.projection(role).named_parameters():
                parameter.requires_grad_(trained[bias if name == "bias" else weight])
        for name in ("bias_k", "bias_v"):
            if name in trained:
                getattr(self, name).requires_grad_(trained[name])
        return self.train(layer.training)

    def to_dense(self) -> nn.MultiheadAttention:
        """Return the ``nn.MultiheadAttention`` of the same weights; nothing is shared with it."""
        fields = {name: getattr(self, name) for name in self.FIELDS}
        new = blank(nn.MultiheadAttention, fields, next(self.parameters()))
        for name, parameter in new.named_parameters():
            path, _, own = name.rpartition(".")
            held = getattr(self.get_submodule(path), own)
            parameter.data.copy_(held.detach())
            parameter.requires_grad_(held.requires_grad)
        return new.train(self.training)

    def projection(self, role: str) -> Any:
        """Return a projection: a ``BPLinear``, or an ``nn.Linear`` where it is left whole."""
        return getattr(self, f"{role}_proj")

    @property
    def way(self) -> Way:
        """How its projections run; see ``BPLinear.way``."""
        ones = (self.projection(role) for role in ROLES)
        expanded = any(getattr(one, "way", "factored") == "expanded" for one in ones)
        return "expanded" if expanded else "factored"

    @way.setter
    def way(self, way: Way) -> None:
        for one in map(self.projection, ROLES):
            if isinstance(one, BPLinear):
                one.way = way

    @property
    def packed(self) -> bool:
        """Whether torch keeps the weights of queries, keys and values in one."""
        return self.kdim == self.vdim == self.embed_dim

    @property
    def bias(self) -> bool:
        """Whether the projections add biases."""
        return self.out_proj.bias is not None

    @property
    def add_bias_kv(self) -> bool:
        """Whether there is one more key and value for all."""
        return self.bias_k is not None

    @property
    def in_proj_weight(self) -> Tensor | None:
        """The dense weight (3E, E), built anew at each access; None where keys or values are of
        another width."""
        if not self.packed:
            return None
        return torch.cat([self.projection(role).weight for role in ROLES[:3]])

    @property
    def in_proj_bias(self) -> Tensor | None:
        """The biases of queries, keys and values above each other (3E)."""
        return torch.cat([self.projection(role).bias for role in ROLES[:3]]) if self.bias else None

    @property
    def q_proj_weight(self) -> Tensor | None:
        """The dense weight of queries, where torch keeps it apart."""
        return None if self.packed else self.q_proj.weight

    @property
    def k_proj_weight(self) -> Tensor | None:
        """The dense weight of keys, where torch keeps it apart."""
        return None if self.packed else self.k_proj.weight

    @property
    def v_proj_weight(self) -> Tensor | None:
        """The dense weight of values, where torch keeps it apart."""
        return None if self.packed else self.v_proj.weight

    def extra_repr(self) -> str:
        """Tell the width, the heads and what else is not as by default."""
        flags = ("add_zero_attn", "batch_first")
        told = [f"{name}=True" for name in flags if getattr(self, name)]
        return ", ".join([f"{self.embed_dim}, {self.num_heads}", *told])


def is_whole(spec: FactorSpec) -> bool:
    """Return whether factors are a weight left as it is: the first one is a 1."""
    return spec.out[0] == spec.inp[0] == 1


def widths_of(layer: Any) -> dict[str, int]:
    """Return how many inputs each projection of an attention has, by role."""
    return {"q": layer.embed_dim, "k": layer.kdim, "v": layer.vdim, "out": layer.embed_dim}


def extra_of(layer: Any) -> tuple[Tensor, Tensor] | None:
    """Return the key and the value that an attention adds to all; None where it adds none."""
    return None if layer.bias_k is None else (layer.bias_k, layer.bias_v)


def attention_fields(layer: nn.MultiheadAttention) -> dict[str, Any]:
    """Read the constructor fields of torch's attention back."""
    names = BPMultiheadAttention.FIELDS
    asked = {"bias": layer.in_proj_bias is not None, "add_bias_kv": layer.bias_k is not None}
    return {name: asked[name] if name in asked else getattr(layer, name) for name in names}


def matrices_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the four weights (E, .) by role, from tensors by torch's names."""
    if "in_proj_weight" in tensors:
        found = dict(zip("qkv", tensors["in_proj_weight"].chunk(3), strict=True))
    else:
        found = {role: tensors[f"{role}_proj_weight"] for role in ROLES[:3]}
    return {**found, "out": tensors["out_proj.weight"]}


def biases_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the four biases (E) by role; none where there are none."""
    if "in_proj_bias" not in tensors:
        return {}
    found = dict(zip("qkv", tensors["in_proj_bias"].chunk(3), strict=True))
    return {**found, "out": tensors["out_proj.bias"]}


def packed(weights: Mapping[str, Tensor], biases: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return by torch's names what is given by role: queries, keys and values in one."""
    found = {"out_proj.weight": weights["out"]}
    found["in_proj_weight"] = torch.cat([weights[role] for role in ROLES[:3]])
    if biases:
        found["out_proj.bias"] = biases["out"]
        found["in_proj_bias"] = torch.cat([biases[role] for role in ROLES[:3]])
    return found


def _dense_name(role: str, what: str, held: Mapping[str, Any]) -> str:
    """Return torch's name of the tensor that holds a projection's weight or bias."""
    if role == "out":
        return f"out_proj.{what}"
    apart = f"{role}_proj_{what}"
    return apart if apart in held else f"in_proj_{what}"


def _given(factors: Mapping[str, FactorSpec] | None, role: str) -> FactorSpec | None:
    if factors is None:
        return None
    unknown = sorted(set(factors) - set(ROLES))
    if role in factors and not unknown:
        return factors[role]
    raise FactorError(
        where=f"BPMultiheadAttention, factors[{role!r}]",
        found=f"factors for {', '.join(factors) or 'nothing'}",
        allowed=f"one FactorSpec for each of {', '.join(ROLES)}",
        fix="leave factors out for the nearest-square pairs",
    )
