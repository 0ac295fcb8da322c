"""What a Kind is: all that the tool knows of one module type."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bp_convert.errors import PlanError
from bp_convert.kinds.rows import Pick, linear_rows
from bp_convert.kron.compute import to_compute
from bp_convert.kron.conv_layout import Axes
from bp_convert.kron.pairs import divisor_pairs
from bp_convert.kron.policies import low_rank_factors, rank_for_share
from bp_convert.values.factors import FactorSpec, Pair
from bp_convert.values.settings import Pairs, Policy, Rank

Factors = dict[str, FactorSpec]
Widths = tuple[int, int]  # (inputs, outputs)
Shape = tuple[int, ...]


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


@dataclass(frozen=True)
class Choices:
    """Every pair that a weight may be given: any of ``outs`` with any of ``ins``.

    Attributes:
        outs: pairs of the outputs, by rising first factor.
        ins: pairs of the columns by who owns the kernel's axes, by rising first factor.
        kernel: sizes of the kernel's axes; none for a matrix.
    """

    outs: tuple[Pair, ...]
    ins: dict[Axes, tuple[Pair, ...]]
    kernel: tuple[int, ...] = ()

    def specs(self) -> Iterator[FactorSpec]:
        """Yield all of them, with one term."""
        for axes, pairs in self.ins.items():
            for inp in pairs:
                for out in self.outs:
                    yield FactorSpec(out=out, inp=inp, axes=axes)


def whole(inputs: int, outputs: int, axes: Axes = ()) -> FactorSpec:
    """Return the spec of a weight that stays as it is: one term whose first factor is a 1."""
    return FactorSpec(out=(1, outputs), inp=(1, inputs), axes=axes)


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
    # True where inputs are indices that are looked up.
    lookup: ClassVar[bool] = False
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

    # What the search for pairs and the fit to data see of a layer

    def choices(self, module: Any, widths: Widths) -> dict[str, Choices]:
        """Return the pairs that each weight matrix may be given, by role."""
        inputs, outputs = widths
        return {"weight": Choices(divisor_pairs(outputs), {(): divisor_pairs(inputs)})}

    def matrices(
        self, module: Any, spread: Spread, factors: Factors | None = None
    ) -> dict[str, list[Tensor]]:
        """Return the dense matrices (K, D) of each role, columns as (channel, kernel place).

        Matrices of one role, such as an LSTM's directions, share pairs and terms, not factors.

        Args:
            factors: what they are to be factored into, where K hangs on that; by default K is
                that of ``choices``.
        """
        return {"weight": [self.spread(module, spread)["weight"].flatten(1)]}

    def computed(self, module: Any, factors: Factors | None = None) -> dict[str, list[Tensor]]:
        """Return the matrices of ``matrices`` as search and fits compute with them."""
        found = self.matrices(module, Spread(), factors)
        return {role: list(map(to_compute, ones)) for role, ones in found.items()}

    @torch.no_grad()
    def add(self, module: Any, role: str, changes: Sequence[Tensor]) -> None:
        """Add to the dense matrices of a role, (K, D) each, in the order of ``matrices``."""
        module.weight.add_(changes[0].reshape(module.weight.shape).to(module.weight))

    def batched(self, module: Any, shape: Shape, batch: int) -> Shape:
        """Return the input shape of a call for a batch, given that for one example."""
        return (shape[0] * batch, *shape[1:]) if shape else shape

    def rows(self, module: Any, x: Any, pick: Pick) -> dict[str, list[Tensor]]:
        """Return what each role's matrices multiply in a call on ``x``: rows (n, D), or indices
        (n,). A role's matrices are shared out evenly among the entries of its list."""
        return {"weight": [linear_rows(x, pick)]}

    def weights(self, module: Any, x: Any) -> dict[str, list[Tensor]]:
        """Return how much each output (K) of a role's matrices counts in a call on ``x``, as a
        mean square, in lists like those of ``rows``; nothing where all count alike."""
        return {}

    @torch.no_grad()
    def place(self, twin: Any, role: str, index: int, w1: Tensor, w2: Tensor) -> None:
        """Set the factors of the ``index``-th matrix of a role.

        Shape:
            w1: (R, k1, d1); w2: (R, d2, k2).
        """
        twin.w1.copy_(w1)
        twin.w2.copy_(w2)

    @torch.no_grad()
    def rest(self, module: Any, twin: Any, spread: Spread) -> None:
        """Set what a twin holds beside its factors: the bias."""
        wide = self.spread(module, spread)
        if "bias" in wide:
            twin.bias.copy_(wide["bias"])

    @torch.no_grad()
    def shift(self, twin: Any, role: str, index: int, change: Tensor) -> bool:
        """Add to the bias behind a matrix; return False where there is none."""
        if twin.bias is None:
            return False
        twin.bias.add_(change.to(twin.bias))
        return True

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
        error: float = twin.fit_(self.spread(module, spread)["weight"])
        self.rest(module, twin, spread)
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
