"""The factors of a recurrent layer: made, fitted, and read as the dense weights they stand for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from typing_extensions import Self

from bp_convert.fields.carry import blank, fields_of, unusual
from bp_convert.kron.nearest import nearest_kronecker_sum
from bp_convert.layers.common import init_factors_
from bp_convert.recurrence.checks import groups, recurrent_factors
from bp_convert.recurrence.paths import built, one_chunk
from bp_convert.recurrence.steps import RECURRENCES, Frame, Recurrence, frame_of, named
from bp_convert.torch_private import parameters_of
from bp_convert.values.factors import FactorSpec
from bp_convert.ways.expanding import Expanding
from bp_convert.ways.kept import Source

_DENSE = re.compile(r"(weight|bias)_(ih|hh|hr)(?:_(l\d+(?:_reverse)?))?")


class RecurrentFactors(Expanding):
    """What a bilinear stack or cell holds; how it runs is in the subclasses.

    Torch's names of dense weights and biases can be read, and are built at each access.
    """

    FIELDS: ClassVar[tuple[str, ...]]  # of the constructor; the widths first
    EXPANDS = True
    DENSE: ClassVar[type[nn.Module]]  # the layer that it stands for
    mode: Any  # torch's field, for code that reads it

    input_size: int
    hidden_size: int
    bias: bool
    proj_size: int = 0
    factors: dict[str, FactorSpec]

    def hold_(
        self,
        factors: Mapping[str, FactorSpec] | None,
        rank: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Make the parameters that the fields and factors ask for, and draw them."""
        matrices = self.frame.matrices()
        self.factors = recurrent_factors(type(self).__name__, factors, matrices, rank)
        where: Any = {"device": device, "dtype": dtype}
        for suffix in self.suffixes():
            for part in self.parts():
                role = _role(part, suffix)
                spec = self.factors[role]
                (k1, k2), (d1, d2), terms = spec.out, spec.inp, spec.rank
                many = groups(spec, matrices[role])
                w1 = nn.Parameter(torch.empty(many, terms, k1, d1, **where))
                w2 = nn.Parameter(torch.empty(many, terms, d2, k2, **where))
                self.register_parameter(named(f"w1_{part}", suffix), w1)
                self.register_parameter(named(f"w2_{part}", suffix), w2)
            if self.bias:
                rows = self.recurrence.gates + self.recurrence.inner
                one = nn.Parameter(torch.empty(rows * self.hidden_size, **where))
                self.register_parameter(_bias(suffix), one)
        self.reset_parameters()

    def sources(self) -> Sequence[Source]:
        """Return where the parameters are held, of which biases are put together anew as well."""
        held = parameters_of(self)
        return tuple((held, name) for name, one in held.items() if one is not None)

    def expand(self) -> list[Tensor]:
        """Build the dense weights and biases in torch's order."""
        weights = []
        for suffix in self.suffixes():
            weights += [built(*self.pair(part, suffix)) for part in ("ih", "hh")]
            if self.bias:
                weights += self.recurrence.apart(self.bias_of(suffix))
            if self.proj_size:
                weights.append(built(*self.pair("hr", suffix)))
        return one_chunk(weights) if weights[0].is_cuda else weights

    def reset_parameters(self) -> None:
        """Draw factors so that weights vary as a fresh torch layer's, 1 / (3 H), and the bias as
        the sum of its two, 2 / (3 H)."""
        variance = 1 / (3 * self.hidden_size)
        for suffix in self.suffixes():
            for part in self.parts():
                w1, w2 = self.pair(part, suffix)
                init_factors_(w1, w2, w1.shape[1], variance)
            if self.bias:
                bound = (3 * 2 * variance) ** 0.5  # var of uniform(-b, b) is b^2 / 3
                bias = self.bias_of(suffix)
                nn.init.uniform_(bias, -bound, bound)
                if self.recurrence.inner:  # those are no sums
                    with torch.no_grad():
                        bias[-2 * self.recurrence.inner * self.hidden_size :] /= 2**0.5

    # Dense and back

    @classmethod
    def from_dense(
        cls,
        layer: Any,
        *,
        factors: Mapping[str, FactorSpec] | None = None,
        rank: int = 1,
    ) -> Self:
        """Return the nearest bilinear layer to a trained one; nothing is shared with it.

        Raises:
            FactorError: pairs that do not fit, or weights that are not finite.
        """
        like, made = next(layer.parameters()), cast(Any, cls)
        new: Self = made(
            **fields_of(layer, cls.FIELDS),
            factors=factors,
            rank=rank,
            device=like.device,
            dtype=like.dtype,
        )
        new.fit_({n: p for n, p in layer.named_parameters() if n.startswith("weight")})
        for suffix in new.suffixes():
            for part in new.parts():
                trained = getattr(layer, named(f"weight_{part}", suffix)).requires_grad
                for factor in new.pair(part, suffix):
                    factor.requires_grad_(trained)
            if layer.bias:
                ih, hh = (getattr(layer, named(f"bias_{part}", suffix)) for part in ("ih", "hh"))
                with torch.no_grad():
                    new.bias_of(suffix).copy_(new.recurrence.joined(ih, hh))
                new.bias_of(suffix).requires_grad_(ih.requires_grad or hh.requires_grad)
        return new.train(layer.training)

    @torch.no_grad()
    def fit_(self, weights: Mapping[str, Tensor]) -> float:
        """Set the factors to the nearest Kronecker sums.

        Args:
            weights: by torch's names, ``weight_ih_l0`` (G*H, I), ``weight_hh_l0`` (G*H, H), ...

        Returns:
            The relative Frobenius error over all matrices.
        """
        gap = total = 0.0
        for suffix in self.suffixes():
            for part in self.parts():
                name = named(f"weight_{part}", suffix)
                spec = self.factors[_role(part, suffix)]
                w1, w2 = self.pair(part, suffix)
                for at, matrix in enumerate(weights[name].chunk(len(w1))):
                    fit = nearest_kronecker_sum(matrix, spec.out, spec.inp, spec.rank, name=name)
                    w1[at].copy_(fit.w1)
                    w2[at].copy_(fit.w2)
                    size = float(torch.linalg.vector_norm(matrix, dtype=torch.float64)) ** 2
                    gap += fit.error**2 * size
                    total += size
        return (gap / total) ** 0.5 if total else 0.0

    def to_dense(self) -> Any:
        """Return the torch layer of the same weights; of its second bias is zero what the first
        can hold."""
        fields = fields_of(self, self.FIELDS)
        dropout = fields.pop("dropout", None)
        new: Any = blank(self.DENSE, fields, next(self.parameters()))
        if dropout is not None:
            new.dropout = dropout  # set late: torch would warn of it where there is one layer
        for name, parameter in new.named_parameters():
            value = getattr(self, name)
            with torch.no_grad():
                parameter.copy_(value)
            parameter.requires_grad_(value.requires_grad)
        return new.train(self.training)

    def __getattr__(self, name: str) -> Any:
        """Build ``weight_ih_l0``, ``bias_hh_l0`` and so on for code that looks at them."""
        found = _DENSE.fullmatch(name)
        parameters = self.__dict__.get("_parameters", {})
        if found is not None:
            what, part, suffix = found[1], found[2], found[3] or ""
            factor = named(f"w1_{part}", suffix)
            if what == "weight" and factor in parameters:
                return built(parameters[factor], parameters[named(f"w2_{part}", suffix)])
            if what == "bias" and part != "hr" and _bias(suffix) in parameters:
                return self.recurrence.apart(parameters[_bias(suffix)])[part == "hh"]
        return super().__getattr__(name)

    @property
    def all_weights(self) -> list[list[Tensor]]:
        """The dense weights and biases of each layer and direction, in torch's order, built anew
        at each access."""
        names = ["weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if self.bias else ())]
        names += ["weight_hr"] if self.proj_size else []
        return [[getattr(self, named(n, suffix)) for n in names] for suffix in self.suffixes()]

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to set what is built: the factors are what can be set."""
        if _DENSE.fullmatch(name):
            fix = "set those, or use fit_()"
            raise AttributeError(f"{name} is built from factors at each access; {fix}")
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """Tell torch's own fields, the pairs and the number of terms."""
        parts = [f"{self.input_size}, {self.hidden_size}", *unusual(self, self.FIELDS[2:])]
        matrices = self.frame.matrices()
        role, other = list(matrices)[:2]
        ih, hh = self.factors[role], self.factors[other]
        (h1, h2), (i1, i2) = ih.out, ih.inp
        ranks = f"{ih.rank}" if ih.rank == hh.rank else f"{ih.rank}+{hh.rank}"
        rows = "hidden" if groups(ih, matrices[role]) == self.recurrence.gates else "gates"
        parts.append(f"{rows}={h1}x{h2}, in={i1}x{i2}, rank={ranks}")
        return ", ".join(parts)

    # Names

    @property
    def frame(self) -> Frame:
        """Its sizes."""
        return frame_of(self)

    @property
    def recurrence(self) -> Recurrence:
        """What a step computes."""
        return RECURRENCES[self.mode]

    def parts(self) -> tuple[str, ...]:
        """Return which matrices a layer has: of the input, of the state, of the projection."""
        return ("ih", "hh", "hr") if self.proj_size else ("ih", "hh")

    def suffixes(self) -> list[str]:
        """Return the suffixes of all layers and directions, such as ``l0_reverse``."""
        return self.frame.suffixes()

    def pair(self, part: str, suffix: str) -> tuple[Tensor, Tensor]:
        """Return a matrix's factors: w1 (G, R, k1, d1), w2 (G, R, d2, k2)."""
        w1, w2 = (parameters_of(self)[named(f"{w}_{part}", suffix)] for w in ("w1", "w2"))
        assert w1 is not None
        assert w2 is not None
        return w1, w2

    def bias_of(self, suffix: str) -> Tensor:
        """Return the bias of a layer and direction."""
        bias = parameters_of(self)[_bias(suffix)]
        assert bias is not None
        return bias


def _role(part: str, suffix: str) -> str:
    return named(part, suffix.removesuffix("_reverse"))


def _bias(suffix: str) -> str:
    """Name the bias: a cell's ``bias`` is the field that says whether there is one."""
    return f"bias_{suffix or 'gates'}"
