"""What a Kind is: all that the tool knows of one module type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bp_convert.errors import PlanError
from bp_convert.kron.policies import low_rank_factors, rank_for_share
from bp_convert.values.factors import FactorSpec
from bp_convert.values.settings import Pairs, Policy, Rank

Factors = dict[str, FactorSpec]
Widths = tuple[int, int]  # (inputs, outputs)


@dataclass(frozen=True)
class Ask:
    """What the settings ask of one layer."""

    pairs: Policy | Pairs = "fast"
    rank: Rank = 1


@dataclass(frozen=True)
class Spread:
    """How the channels of a widened layer stem from those of its source.

    Attributes:
        inputs: for each new input, the old input that it repeats; None where nothing changed.
        outputs: for each new output, the old output that it repeats; None where nothing changed.
    """

    inputs: Tensor | None = None  # (D',)
    outputs: Tensor | None = None  # (K',)

    def rows(self, weight: Tensor, axis: int = 0) -> Tensor:
        """Repeat outputs along ``axis``."""
        if self.outputs is None:
            return weight
        return weight.index_select(axis, self.outputs.to(weight.device))

    def columns(self, weight: Tensor, axis: int = 1) -> Tensor:
        """Repeat inputs along ``axis`` and share each old weight among its repeats."""
        if self.inputs is None:
            return weight
        inputs = self.inputs.to(weight.device)
        times = torch.bincount(inputs, minlength=weight.shape[axis])  # (D,)
        shape = [1] * weight.dim()
        shape[axis] = -1
        share = times.clamp(min=1).to(weight.dtype).reciprocal().view(shape)
        return (weight * share).index_select(axis, inputs)


class Kind(ABC):
    """One module type: what it is, why it might be refused, how its twin is built and filled.

    A new kind subclasses this and joins ``KINDS`` in ``bp_convert/kinds/__init__.py``; the
    contract suite in ``tests/contract`` then runs over it.
    """

    name: ClassVar[str]
    dense: ClassVar[type[nn.Module]]
    twin: ClassVar[type[nn.Module]]
    # Constructor fields that a twin carries over as they are, or that refuse() looks at.
    fields: ClassVar[tuple[str, ...]]
    # True where alpha squared, not alpha, widens the outputs (paper, section III-D).
    squared: ClassVar[bool] = False

    def matches(self, module: nn.Module) -> bool:
        """Return whether this kind speaks for ``module``: its type, or a subclass that computes
        the same because it does not override ``forward``."""
        if type(module) is self.dense:
            return True
        if not isinstance(module, self.dense) or type(module).__module__.startswith("bp_convert."):
            return False
        mro = type(module).__mro__
        own = {name for base in mro[: mro.index(self.dense)] for name in vars(base)}
        return not own & {"forward", "_conv_forward", "__call__"}

    @abstractmethod
    def refuse(self, module: Any) -> str | None:
        """Return why this module cannot be converted, or None."""

    @abstractmethod
    def widths(self, module: Any) -> Widths:
        """Return the number of inputs and outputs."""

    @abstractmethod
    def factor(self, module: Any, widths: Widths, ask: Ask) -> Factors:
        """Choose the factors for these widths.

        Raises:
            PlanError: explicit pairs that do not fit the widths.
        """

    @abstractmethod
    def params(self, module: Any, widths: Widths, factors: Factors | None = None) -> int:
        """Count the parameters at these widths: the twin's, or the dense layer's without
        ``factors``."""

    @abstractmethod
    def macs(
        self, module: Any, widths: Widths, factors: Factors, shapes: Sequence[tuple[int, ...]]
    ) -> int:
        """Predict the twin's multiply-adds over calls with inputs of these (old) shapes."""

    @abstractmethod
    def build(
        self, module: Any, widths: Widths, factors: Factors, device: torch.device | str
    ) -> nn.Module:
        """Make the twin with fresh random weights, in the module's dtype.

        Raises:
            FactorError: factors that do not fit the widths.
        """

    def spread(self, module: Any, spread: Spread) -> dict[str, Tensor]:
        """Return the dense layer's tensors, by name, at the widened sizes."""
        wide = {"weight": spread.columns(spread.rows(module.weight))}
        if module.bias is not None:
            wide["bias"] = spread.rows(module.bias)
        return wide

    @torch.no_grad()
    def fill(self, module: Any, twin: Any, spread: Spread) -> float:
        """Set the twin to the nearest Kronecker sum of the widened weights; return the relative
        Frobenius error."""
        wide = self.spread(module, spread)
        error: float = twin.fit_(wide["weight"])
        if "bias" in wide:
            twin.bias.copy_(wide["bias"])
        return error

    def carry(self, module: nn.Module, twin: nn.Module) -> None:
        """Carry over the training flag and which parameters are trained."""
        twin.train(module.training)
        weight = next((p for n, p in module.named_parameters() if n.startswith("weight")), None)
        bias = next((p for n, p in module.named_parameters() if n.startswith("bias")), None)
        for name, parameter in twin.named_parameters():
            source = bias if name.startswith("bias") else weight
            if source is not None:
                parameter.requires_grad_(source.requires_grad)


def explicit(module: nn.Module, name: str, pairs: Pairs, widths: Widths) -> FactorSpec:
    """Check explicit pairs against the widths.

    Raises:
        PlanError: a product that is not the width.
    """
    inputs, outputs = widths
    for side, pair, width in (("out", pairs.out, outputs), ("in", pairs.inp, inputs)):
        if pair[0] * pair[1] != width:
            raise PlanError(
                where=f"{name} ({type(module).__name__})",
                found=f"pairs {side} {pair[0]} x {pair[1]} = {pair[0] * pair[1]}",
                allowed=f"two factors of {width}",
                fix=f"give {side} as two numbers whose product is {width}",
            )
    return FactorSpec(out=pairs.out, inp=pairs.inp)


def with_rank(spec: FactorSpec, rank: Rank, dense: int) -> FactorSpec:
    """Give ``spec`` its number of terms; a share counts against the ``dense`` weight's size."""
    terms = rank_for_share(spec, rank * dense) if isinstance(rank, float) else rank
    return spec.model_copy(update={"rank": min(terms, spec.full_rank)})


def low_rank_share(widths: Widths, share: float) -> FactorSpec:
    """Spend a share of a matrix's parameters on the form that costs least time per parameter."""
    inputs, outputs = widths
    return with_rank(low_rank_factors(inputs, outputs, 1), share, inputs * outputs)


def bias_size(module: nn.Module, outputs: int) -> int:
    """Return the bias's size at this width, 0 where there is none."""
    return 0 if getattr(module, "bias", None) is None else outputs


def fields_of(module: nn.Module, names: Sequence[str]) -> Mapping[str, Any]:
    """Read constructor fields back from a module."""
    return {name: getattr(module, name) for name in names}
