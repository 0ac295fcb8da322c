"""Bilinear layers as two ``nn.Linear`` each, for quantisers and adapters that look for these."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from bp_convert.errors import CheckpointError
from bp_convert.fields.carry import blank
from bp_convert.graph.clone import clone
from bp_convert.hub.marked import METHOD, PLAN_ATTRIBUTE
from bp_convert.hub.tied_names import tell_ties
from bp_convert.kinds import is_twin
from bp_convert.kron import contract
from bp_convert.kron.nearest import reconstruct
from bp_convert.layers import BPConv1D, BPLinear
from bp_convert.layers.common import over_nested
from bp_convert.values.factors import FactorSpec

_log = logging.getLogger("bp_convert")


class FactoredLinear(nn.Module):
    """Apply ``Y = sum_r w1[r] X w2[r] + B`` (paper, eq. 3) by two ``nn.Linear``, with an exchange
    of axes between: ``first`` on one axis of X, all terms side by side, ``last`` on the other.

    Args:
        in_features: D = d1*d2.
        out_features: K = k1*k2.
        bias: add a learnable bias; it is a part of ``last`` where that puts out all of K.
        factors: pairs and number of terms.
        w2_first: which factor ``first`` is; by default the one that takes fewer multiply-adds.

    Shape:
        input (..., D), output (..., K); of ``first`` and ``last`` with w2 first (k2*R, d2) and
        (k1, d1*R), else (k1*R, d1) and (k2, d2*R).
    """

    final_bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        factors: FactorSpec,
        w2_first: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.factors = in_features, out_features, factors
        (k1, k2), (d1, d2), terms = factors.out, factors.inp, factors.rank
        self.pair, self.terms = (d1, d2), terms  # plain, as torch.compile wants them
        self.w2_first = contract.w2_first(k1, k2, d1, d2) if w2_first is None else w2_first
        # X as ``first`` takes it is (a, b), its outputs are (a, c, R), those of ``last`` (c, e).
        a, b, c, e = (d1, d2, k2, k1) if self.w2_first else (d2, d1, k1, k2)
        where: Any = {"device": device, "dtype": dtype}
        self.first = nn.Linear(b, c * terms, False, **where)
        self.last = nn.Linear(a * terms, e, bias and c == 1, **where)
        shift = nn.Parameter(torch.zeros(out_features, **where)) if bias and c > 1 else None
        self.register_parameter("final_bias", shift)

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., D) to (..., K); of a nested tensor each sequence."""
        if input.is_nested:
            return over_nested(self, input)
        x = torch.unflatten(input, -1, self.pair)  # (..., d1, d2)
        t = self.first(x if self.w2_first else x.transpose(-1, -2))  # (..., a, c*R)
        t = torch.unflatten(t, -1, (-1, self.terms)).transpose(-2, -3)  # (..., c, a, R)
        y: Tensor = self.last(t.flatten(-2))  # (..., c, e)
        y = (y.transpose(-1, -2) if self.w2_first else y).flatten(-2)
        return y if self.final_bias is None else y + self.final_bias.to(y.dtype)

    @property
    def bias(self) -> Tensor | None:
        """The bias (K), wherever it is added."""
        bias = _numbers(self.last.bias)
        return self.final_bias if bias is None else bias

    @property
    def weight(self) -> Tensor:
        """The dense weight (K, D), built anew at each access, for code that looks at it."""
        (k1, k2), (d1, d2), terms = self.factors.out, self.factors.inp, self.factors.rank
        one, two = _numbers(self.first.weight), _numbers(self.last.weight)
        if self.w2_first:
            w1, w2 = two.view(k1, d1, terms), one.view(k2, terms, d2).transpose(1, 2)
        else:
            w1, w2 = one.view(k1, terms, d1).transpose(1, 2), two.view(k2, d2, terms)
        return reconstruct(w1.permute(2, 0, 1), w2.permute(2, 1, 0))

    def extra_repr(self) -> str:
        """Tell the widths and the factors."""
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.factors}"


def _numbers(held: Any) -> Any:
    """Return a weight or a bias, whatever a quantiser made of it, as plain numbers."""
    one = held() if callable(held) else held  # torch.ao's layers have methods
    if one is None or (type(one) in (Tensor, nn.Parameter) and not one.is_quantized):
        return one
    return one.dequantize()


class _Maker:
    """Makes ``FactoredLinear`` of layers; factors and biases that layers share stay shared."""

    def __init__(self, layers: Collection[BPLinear]) -> None:
        self.held = Counter(id(one.w2) for one in layers)
        self.made: dict[tuple[int, bool], nn.Parameter] = {}
        self.biases: dict[int, Tensor] = {}  # which may stand beside their layers, too

    @torch.no_grad()
    def __call__(self, layer: BPLinear) -> FactoredLinear:
        fields: dict[str, Any] = {
            "in_features": layer.in_features,
            "out_features": layer.out_features,
            "bias": layer.bias is not None,
            "factors": layer.factors,
            # All who share it then hold it in the same form.
            "w2_first": True if self.held[id(layer.w2)] > 1 else None,
        }
        new = blank(FactoredLinear, fields, layer.w1)
        w1, w2 = layer.w1.permute(1, 2, 0), layer.w2.permute(2, 1, 0)  # (k1, d1, R), (k2, d2, R)
        both = ((layer.w2, w2), (layer.w1, w1))
        (one, first), (two, last) = both if new.w2_first else both[::-1]
        new.first.weight = self._own((id(one), True), one, first.transpose(1, 2).flatten(0, 1))
        new.last.weight = self._own((id(two), False), two, last.flatten(1))
        if layer.bias is not None:
            bias: Any = self._own((id(layer.bias), True), layer.bias, layer.bias)
            self.biases[id(layer.bias)] = bias
            if new.final_bias is None:
                new.last.bias = bias
            else:
                new.final_bias = bias
        return new.train(layer.training)

    def _own(self, key: tuple[int, bool], held: Tensor, numbers: Tensor) -> nn.Parameter:
        if key not in self.made:
            copy = numbers.detach().clone(memory_format=torch.contiguous_format)
            self.made[key] = nn.Parameter(copy, requires_grad=held.requires_grad)
        return self.made[key]


def linear_clone(model: nn.Module, stay: Collection[str] = ()) -> nn.Module:
    """Copy ``model`` with each ``BPLinear`` and ``BPConv1D`` exchanged for a ``FactoredLinear``;
    the log says which bilinear layers stay.

    Args:
        stay: names of layers whose weight is read instead of their being called.
    """
    twins = {name: one for name, one in model.named_modules() if is_twin(one)}
    kept = {
        name: one
        for name, one in twins.items()
        if type(one) not in (BPLinear, BPConv1D) or name in stay
    }
    # A head that holds an embedding's factors shares them still.
    tied = {id(held) for one in kept.values() for held in one.parameters(recurse=False)}
    kept.update(
        (name, one)
        for name, one in twins.items()
        if tied & {id(getattr(one, factor, None)) for factor in ("w1", "w2")}
    )
    layers: Any = [one for name, one in twins.items() if name not in kept]
    make = _Maker(layers)
    made = clone(model, {one: make(one) for one in layers}, make.biases)
    left = [
        f"{name or 'the model'} ({type(one).__name__})"
        for name, one in kept.items()
        if not set(one.modules()) & set(layers)  # else it is a layer of layers, such as attention
    ]
    told = f"; as they were stay {', '.join(left)}" if left else ""
    _log.info("two nn.Linear each of %d bilinear layers%s", len(layers), told)
    vars(made).pop(PLAN_ATTRIBUTE, None)
    for module in made.modules():
        if callable(getattr(type(module), METHOD, None)):
            vars(module)[METHOD] = refuse_linears
    tell_ties(made)
    return made


def check_no_linears(model: nn.Module) -> None:
    """Refuse to write a model of ``to_linears``, of which no file says what its layers are.

    Raises:
        CheckpointError: it holds such layers.
    """
    if any(isinstance(one, FactoredLinear) for one in model.modules()):
        refuse_linears()


def refuse_linears(*arguments: Any, **options: Any) -> NoReturn:
    """Stand for ``save_pretrained`` of a model of ``to_linears``.

    Raises:
        CheckpointError: always.
    """
    raise CheckpointError(
        where="saving what to_linears returned",
        found="bilinear layers as two nn.Linear each, which a file of a converted model has no "
        "place for",
        allowed="the converted model that it was made of",
        fix="save that one, and call bp_convert.to_linears on what bp_convert.load returns; "
        "torch.save(model.state_dict(), FILE) keeps weights that were changed since",
    )
