"""The factors of an LSTM's matrices: made, fitted, and read as the dense weights they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from bp_convert.kron.nearest import nearest_kronecker_sum
from bp_convert.layers.carry import blank, fields_of, unusual
from bp_convert.layers.common import init_factors_
from bp_convert.layers.lstm_checks import GATES, check_fields, groups, lstm_factors
from bp_convert.layers.lstm_paths import built
from bp_convert.torch_private import parameters_of
from bp_convert.values.factors import FactorSpec


class LSTMFactors(nn.Module):
    """What a ``BPLSTM`` holds; how it runs is in the subclass.

    Torch's names of dense weights and biases can be read, and are built at each access.
    """

    FIELDS: ClassVar = (  # the widths first
        *("input_size", "hidden_size", "num_layers", "bias", "batch_first"),
        *("dropout", "bidirectional", "proj_size"),
    )
    DENSE: ClassVar = nn.LSTM
    mode: ClassVar[str] = "LSTM"  # torch's field, for code that reads it

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        *,
        factors: Mapping[str, FactorSpec] | None = None,
        rank: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_fields(num_layers, dropout, proj_size)
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = float(dropout)
        self.bidirectional = bidirectional
        self.proj_size = 0
        self.factors = lstm_factors(
            factors,
            input_size,
            hidden_size,
            num_layers=num_layers,
            bidirectional=bidirectional,
            rank=rank,
        )
        where: Any = {"device": device, "dtype": dtype}
        for suffix in self.suffixes():
            for role in ("ih", "hh"):
                spec = self.spec_of(role, suffix)
                (k1, k2), (d1, d2), terms = spec.out, spec.inp, spec.rank
                many = groups(spec, hidden_size)
                w1 = nn.Parameter(torch.empty(many, terms, k1, d1, **where))
                w2 = nn.Parameter(torch.empty(many, terms, d2, k2, **where))
                self.register_parameter(f"w1_{role}_{suffix}", w1)
                self.register_parameter(f"w2_{role}_{suffix}", w2)
            if bias:
                one = nn.Parameter(torch.empty(GATES * hidden_size, **where))
                self.register_parameter(f"bias_{suffix}", one)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw factors so that weights vary as a fresh ``nn.LSTM``'s, 1 / (3 H), and the bias as
        the sum of its two, 2 / (3 H)."""
        variance = 1 / (3 * self.hidden_size)
        for suffix in self.suffixes():
            for role in ("ih", "hh"):
                w1, w2 = self.pair(role, suffix)
                init_factors_(w1, w2, w1.shape[1], variance)
            if self.bias:
                bound = (3 * 2 * variance) ** 0.5  # var of uniform(-b, b) is b^2 / 3
                nn.init.uniform_(self.bias_of(suffix), -bound, bound)

    # Dense and back

    @classmethod
    def from_dense(
        cls,
        layer: nn.LSTM,
        *,
        factors: Mapping[str, FactorSpec] | None = None,
        rank: int = 1,
    ) -> Self:
        """Return the nearest bilinear LSTM to a trained one; nothing is shared with it.

        Raises:
            FactorError: proj_size, pairs that do not fit, or weights that are not finite.
        """
        like: Any = layer.weight_ih_l0
        new = cls(
            **fields_of(layer, cls.FIELDS),
            factors=factors,
            rank=rank,
            device=like.device,
            dtype=like.dtype,
        )
        new.fit_({n: p for n, p in layer.named_parameters() if n.startswith("weight")})
        for suffix in new.suffixes():
            for role in ("ih", "hh"):
                trained = getattr(layer, f"weight_{role}_{suffix}").requires_grad
                for factor in new.pair(role, suffix):
                    factor.requires_grad_(trained)
            if layer.bias:
                ih, hh = (getattr(layer, f"bias_{role}_{suffix}") for role in ("ih", "hh"))
                with torch.no_grad():
                    new.bias_of(suffix).copy_(ih + hh)
                new.bias_of(suffix).requires_grad_(ih.requires_grad or hh.requires_grad)
        return new.train(layer.training)

    @torch.no_grad()
    def fit_(self, weights: Mapping[str, Tensor]) -> float:
        """Set the factors to the nearest Kronecker sums.

        Args:
            weights: by torch's names, ``weight_ih_l0`` (4H, I), ``weight_hh_l0`` (4H, H), ...

        Returns:
            The relative Frobenius error over all matrices.
        """
        gap = total = 0.0
        for suffix in self.suffixes():
            for role in ("ih", "hh"):
                name = f"weight_{role}_{suffix}"
                spec = self.spec_of(role, suffix)
                w1, w2 = self.pair(role, suffix)
                for at, matrix in enumerate(weights[name].chunk(len(w1))):
                    fit = nearest_kronecker_sum(matrix, spec.out, spec.inp, spec.rank, name=name)
                    w1[at].copy_(fit.w1)
                    w2[at].copy_(fit.w2)
                    size = float(torch.linalg.vector_norm(matrix, dtype=torch.float64)) ** 2
                    gap += fit.error**2 * size
                    total += size
        return (gap / total) ** 0.5 if total else 0.0

    def to_dense(self) -> nn.LSTM:
        """Return the ``nn.LSTM`` of the same weights; its second bias is zero."""
        fields = {**fields_of(self, self.FIELDS), "dropout": 0.0}
        new = blank(nn.LSTM, fields, self.w1_ih_l0)
        new.dropout = self.dropout  # set late: torch would warn of it where there is one layer
        for name, parameter in new.named_parameters():
            value = getattr(self, name)
            with torch.no_grad():
                parameter.copy_(value)
            parameter.requires_grad_(value.requires_grad)
        return new.train(self.training)

    def __getattr__(self, name: str) -> Any:
        """Build ``weight_ih_l0``, ``bias_hh_l0`` and so on for code that looks at them."""
        role = _role(name)
        parameters = self.__dict__.get("_parameters", {})
        if role and name.startswith("weight") and f"w1_{role}" in parameters:
            return built(parameters[f"w1_{role}"], parameters[f"w2_{role}"])  # (4H, D)
        if role and name.startswith("bias") and f"bias_{role[3:]}" in parameters:
            bias = parameters[f"bias_{role[3:]}"]
            return bias.view_as(bias) if role.startswith("ih") else torch.zeros_like(bias)
        return super().__getattr__(name)

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The dense weights and biases of each layer and direction, in nn.LSTM's order, built anew
        at each access."""
        parts = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if self.bias else ()))
        return [[getattr(self, f"{part}_{suffix}") for part in parts] for suffix in self.suffixes()]

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to set what is built: the factors are what can be set."""
        if _role(name):
            fix = "set those, or use fit_()"
            raise AttributeError(f"{name} is built from factors at each access; {fix}")
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """Tell torch's own fields, the pairs and the number of terms."""
        parts = [f"{self.input_size}, {self.hidden_size}", *unusual(self, self.FIELDS[2:])]
        ih, hh = self.factors["ih_l0"], self.factors["hh_l0"]
        (h1, h2), (i1, i2) = ih.out, ih.inp
        ranks = f"{ih.rank}" if ih.rank == hh.rank else f"{ih.rank}+{hh.rank}"
        rows = "hidden" if groups(ih, self.hidden_size) == GATES else "gates"
        parts.append(f"{rows}={h1}x{h2}, in={i1}x{i2}, rank={ranks}")
        return ", ".join(parts)

    # Names

    def passes(self) -> int:
        """Return how many layers and directions there are."""
        return self.num_layers * (2 if self.bidirectional else 1)

    def sides(self, layer: int) -> list[str]:
        """Return the suffixes of a layer's directions, such as ``l0_reverse``."""
        return [f"l{layer}", f"l{layer}_reverse"] if self.bidirectional else [f"l{layer}"]

    def suffixes(self) -> list[str]:
        """Return those of all layers."""
        return list(chain.from_iterable(map(self.sides, range(self.num_layers))))

    def spec_of(self, role: str, suffix: str) -> FactorSpec:
        """Return the spec of a matrix: ``ih`` or ``hh``, and whose."""
        return self.factors[f"{role}_{suffix.removesuffix('_reverse')}"]

    def pair(self, role: str, suffix: str) -> tuple[Tensor, Tensor]:
        """Return its factors: w1 (G, R, k1, d1), w2 (G, R, d2, k2)."""
        w1, w2 = (parameters_of(self)[f"{w}_{role}_{suffix}"] for w in ("w1", "w2"))
        assert w1 is not None
        assert w2 is not None
        return w1, w2

    def bias_of(self, suffix: str) -> Tensor:
        """Return the bias (4H) of a layer and direction."""
        bias = parameters_of(self)[f"bias_{suffix}"]
        assert bias is not None
        return bias


def _role(name: str) -> str | None:
    """Return ``ih_l0`` for torch's ``weight_ih_l0`` and ``bias_ih_l0``, None for other names."""
    for kind in ("weight_", "bias_"):
        rest = name.removeprefix(kind)
        if rest != name and rest.startswith(("ih_l", "hh_l")):
            return rest
    return None
