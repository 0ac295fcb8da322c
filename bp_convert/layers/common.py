"""What bilinear layers share: a random start, checked factors, the way to dense and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from bp_convert.fields.carry import adopt, blank, fields_of, release
from bp_convert.kron.nearest import nearest_kronecker_sum, reconstruct
from bp_convert.kron.repeated import nearest_to_repeated
from bp_convert.torch_private import parameters_of
from bp_convert.values.factors import FactorSpec
from bp_convert.ways.expanding import Expanding
from bp_convert.ways.kept import Source

SMALL = 2**20  # numbers of a weight with repeats, up to which it is built to be fitted


class BilinearLayer(Expanding):
    """A layer of one weight, which is a sum of Kronecker products; the defaults are those of a
    matrix (K, D) and a bias (K).

    Shape:
        w1 (R, k1, d1), w2 (R, d2, k2), bias (K); with G groups each factor is (G, ...).
    """

    FIELDS: ClassVar[tuple[str, ...]]  # of the constructor; the widths first
    DENSE: ClassVar[type[nn.Module]]  # the layer that it stands for

    factors: FactorSpec
    w1: nn.Parameter
    w2: nn.Parameter
    bias: Tensor | None

    def hold_(
        self,
        factors: FactorSpec,
        *,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        groups: int = 1,
    ) -> None:
        """Make the parameters that checked factors ask for, of each group, and draw them."""
        (k1, k2), (d1, d2), terms = factors.out, factors.inp, factors.rank
        where: Any = {"device": device, "dtype": dtype}
        many = () if groups == 1 else (groups,)
        self.factors = factors
        self.w1 = nn.Parameter(torch.empty(*many, terms, k1, d1, **where))
        self.w2 = nn.Parameter(torch.empty(*many, terms, d2, k2, **where))
        if bias:
            self.bias = nn.Parameter(torch.empty(groups * k1 * k2, **where))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw factors so that the weight varies as a fresh torch layer's: 1 / (3 D)."""
        fan_in = prod(self.factors.inp)
        init_factors_(self.w1, self.w2, self.factors.rank, 1 / (3 * fan_in))
        if self.bias is not None:
            nn.init.uniform_(self.bias, -(fan_in**-0.5), fan_in**-0.5)

    @classmethod
    def from_dense(cls, layer: Any, *, factors: FactorSpec | None = None, rank: int = 1) -> Self:
        """Return the nearest bilinear layer to a trained one; nothing is shared with it.

        Raises:
            FactorError: fields that it cannot have, pairs that do not fit, or weights that are
                not finite.
        """
        made: Any = cls
        new: Self = made(
            **fields_of(layer, cls.FIELDS),
            factors=factors,
            rank=rank,
            device=layer.weight.device,
            dtype=layer.weight.dtype,
        )
        new.fit_(layer.weight)
        bias = getattr(new, "bias", None)
        if bias is not None:
            with torch.no_grad():
                bias.copy_(layer.bias)
        return adopt(new, layer)

    @torch.no_grad()
    def fit_(self, weight: Tensor) -> float:
        """Set the factors to the nearest Kronecker sum of ``weight``; return the relative
        Frobenius error."""
        fit = nearest_kronecker_sum(weight, self.factors.out, self.factors.inp, self.factors.rank)
        self.w1.copy_(fit.w1)
        self.w2.copy_(fit.w2)
        return fit.error

    @torch.no_grad()
    def fit_repeated_(self, weight: Tensor, rows: Tensor, columns: Tensor) -> float:
        """Set the factors to the nearest Kronecker sum of ``weight[rows][:, columns]``; return the
        relative Frobenius error. What is large is not built.

        Shape:
            weight (K', D'), with the columns of a kernel innermost; rows (K), columns (D).
        """
        spec = self.factors
        if len(rows) * len(columns) <= SMALL:
            fit = nearest_kronecker_sum(weight[rows][:, columns], spec.out, spec.inp, spec.rank)
        else:
            fit = nearest_to_repeated(weight, rows, columns, spec.out, spec.inp, spec.rank)
        self.w1.copy_(fit.w1)
        self.w2.copy_(fit.w2)
        return fit.error

    def dense_weight(self) -> Tensor:
        """Build the weight; differentiable."""
        return reconstruct(self.w1, self.w2)

    def sources(self) -> Sequence[Source]:
        """Return where the factors are held; those that are computed are not."""
        held = parameters_of(self)
        return (held, "w1"), (held, "w2")

    def expand(self) -> Tensor | None:
        """Build the weight, where the bias is of its type, as torch's functions want it."""
        bias = parameters_of(self).get("bias")
        alike = bias is None or bias.dtype == self.w1.dtype
        return self.dense_weight().contiguous() if alike else None

    @property
    def weight(self) -> Tensor:
        """The dense weight, built anew at each access, for code that looks at it."""
        return self.dense_weight()

    def to_dense(self) -> Any:
        """Return the torch layer of the same weight; nothing is shared with it."""
        return release(blank(self.DENSE, fields_of(self, self.FIELDS), self.w1), self)


def init_factors_(w1: Tensor, w2: Tensor, rank: int, variance: float) -> None:
    """Fill factors so that each entry of their Kronecker sum has the given variance, as a dense
    layer's would.

    An entry of the weight is a sum of R products of two independent entries, so its variance is
    R * var(w1) * var(w2); both factors get the same.
    """
    bound = (9 * variance / rank) ** 0.25  # var of uniform(-b, b) is b^2 / 3
    nn.init.uniform_(w1, -bound, bound)
    nn.init.uniform_(w2, -bound, bound)


def over_nested(layer: Callable[[Tensor], Tensor], input: Any) -> Tensor:
    """Apply a layer that maps (..., D) to (..., K) to all sequences (T_n, D) at once, as
    attention's fused path passes them."""
    if input.layout == torch.jagged:
        made: Tensor = torch.nested.nested_tensor_from_jagged(
            layer(input.values()), input.offsets(), input.lengths()
        )
        return made
    parts = input.unbind()  # (T_n, D) each
    rows = layer(torch.cat(parts))  # (sum of T_n, K)
    apart = torch.split(rows, [len(one) for one in parts])
    return torch.nested.as_nested_tensor(list(apart))
