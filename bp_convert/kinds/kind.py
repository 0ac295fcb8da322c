"""What a Kind is: all that the tool knows of one module type.

The defaults are those of a layer with one ``weight`` (K, D) and perhaps a bias (K) that maps
(..., D) to (..., K).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bp_convert.fields.carry import adopt, fields_of
from bp_convert.kinds.choices import (
    Ask,
    Choices,
    Factors,
    Widths,
    matrix_factors,
    named_pairs,
    with_rank,
)
from bp_convert.kinds.shapes import Form, Shape, Sizes, contradiction, shape_of
from bp_convert.kinds.speed import Counts
from bp_convert.kinds.spread import Spread
from bp_convert.kron.compute import to_compute
from bp_convert.kron.contract import bilinear_macs
from bp_convert.kron.pairs import divisor_pairs
from bp_convert.seen.pick import Pick, linear_rows
from bp_convert.values.settings import Pairs
from bp_convert.values.tensors import TensorSpec

STEPS = 8  # of an example sequence
Examples = Iterator[tuple[TensorSpec, str]]


class Kind:
    """One module type: what it is, why it might be refused, how its twin is built and filled.

    To add one, write its layer and a subclass of this in one file, and list it in ``KINDS``; the
    contract suite in ``tests/contract`` then runs over it. The twin takes the constructor fields
    that its ``FIELDS`` names, the two widths first, and ``factors``, ``device`` and ``dtype``; it
    has ``fit_(weight)``, which returns the relative error, and ``to_dense()``. Most are a
    ``BilinearLayer``.
    """

    name: ClassVar[str]
    twin: ClassVar[Any]
    # Types that hang on widths as the dense type does, though this kind does not replace them.
    alike: ClassVar[tuple[type[nn.Module], ...]] = ()
    # Constructor fields of the dense layer that its twin lacks: refuse() looks at them.
    refused: ClassVar[tuple[str, ...]] = ()
    # True where inputs are indices that are looked up.
    lookup: ClassVar[bool] = False
    # True where alpha squared, not alpha, widens the outputs (paper, section III-D).
    squared: ClassVar[bool] = False
    # True where torch's counter of operations sees nothing of the layer, nor of its twin, on a CPU.
    uncounted: ClassVar[bool] = False
    # True where its twin takes factors, and is fitted to tensors, by role; not those of one weight.
    several: ClassVar[bool] = False
    # True where what it costs is a sum over its roles: ``macs`` and ``operations`` take some of
    # the factors, too, and tell of their roles.
    additive: ClassVar[bool] = False
    # True where two such layers that read the same tensor multiply the same rows.
    same_rows: ClassVar[bool] = False
    # True where it stands for a parameter that a class holds; no module of a source model is one.
    bare: ClassVar[bool] = False
    # True where a subclass with a forward of its own may be tried on inputs drawn for it.
    probed: ClassVar[bool] = True
    # True where its outputs are as wide as its inputs: alpha widens the layers around it.
    follows: ClassVar[bool] = False
    # Names of modules inside that are part of the layer, and no layers of their own.
    parts: ClassVar[tuple[str, ...]] = ()
    # The kind whose prices hold for this one, where it has none of its own.
    priced_as: ClassVar[str] = ""

    @property
    def dense(self) -> type[nn.Module]:
        """The layer that the twin stands for."""
        found: type[nn.Module] = self.twin.DENSE
        return found

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the dense layer's constructor fields; the widths come first."""
        return (*self.twin.FIELDS, *self.refused)

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

    def base_of(self, module: nn.Module) -> type[nn.Module]:
        """Return which of this kind's types a module is."""
        return next(one for one in (self.dense, *self.alike) if isinstance(module, one))

    # Widths, and what hangs on them

    def form(self, module: Any) -> Form:
        """Return how the tensors and attributes hang on the widths; its sizes are those that the
        module's attributes tell."""
        inputs, outputs = self.fields[:2]
        return Form(
            own={"out": getattr(module, outputs)},
            inputs=((-1, getattr(module, inputs)),),
            sizes=lambda own, inp: Sizes(
                {"weight": (own["out"], inp[0]), "bias": (own["out"],)},
                {outputs: own["out"], inputs: inp[0]},
                own["out"],
            ),
            base=self.base_of(module),
        )

    def refuse(self, module: Any) -> str | None:
        """Return why this module cannot be converted, or None."""
        return contradiction(module, self.form(module).told().tensors)

    def read(self, module: Any) -> dict[str, Any]:
        """Read the constructor fields back."""
        return fields_of(module, self.fields)

    def not_widened(self, module: Any) -> str | None:
        """Return why this module has no twin of other widths, or None."""
        return None

    def widths(self, module: Any) -> Widths:
        """Return the number of inputs and outputs."""
        shape = shape_of(module, "weight") or ()
        inputs, outputs = (getattr(module, name) for name in self.fields[:2])
        return (shape[1], shape[0]) if len(shape) == 2 else (inputs, outputs)

    def channel_axis(self, module: Any) -> int | None:
        """Return the axis of the input along which its channels lie; None where it has none."""
        return -1

    def batched(self, module: Any, shape: Shape, batch: int) -> Shape:
        """Return the input shape of a call for a batch, given that for one example."""
        return (shape[0] * batch, *shape[1:]) if shape else shape

    def call_shape(self, module: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Shape | None:
        """Return the shape of a call that the counts below take; None for its first tensor's."""
        return None

    def empty_output(self, module: Any, x: Tensor) -> Tensor | None:
        """Return an empty tensor of the shape that a call on ``x`` gives, where that is easily
        told."""
        return x.new_empty(*x.shape[:-1], getattr(module, self.fields[1]))

    def shapes_only(self, module: Any) -> Callable[..., Any] | None:
        """Return a forward that computes shapes alone; None where the module's own does on tensors
        without data."""
        return None

    def examples(self, module: Any, name: str) -> Examples:
        """Yield what one example of the input may look like, the likeliest first, and words on it.

        Args:
            name: of the layer.
        """
        inputs = getattr(module, self.fields[0])
        words = f"{inputs} features, from its first layer {name}"
        yield TensorSpec(shape=(inputs,)), words
        yield TensorSpec(shape=(STEPS, inputs)), f"{STEPS} steps of {words}"

    # Factors

    def factor(self, module: Any, widths: Widths, ask: Ask) -> Factors:
        """Choose the factors for these widths.

        Raises:
            PlanError: explicit pairs that do not fit the widths.
        """
        if not isinstance(ask.pairs, Pairs):
            return {"weight": matrix_factors(widths, ask)}
        spec = named_pairs(f"{self.name} ({type(module).__name__})", ask.pairs, widths)
        return {"weight": with_rank(spec, ask.rank, prod(widths))}

    def choices(self, module: Any, widths: Widths) -> dict[str, Choices]:
        """Return the pairs that each weight matrix may be given, by role."""
        inputs, outputs = widths
        return {"weight": Choices(divisor_pairs(outputs), {(): divisor_pairs(inputs)})}

    # Counts

    def params(self, module: Any, widths: Widths, factors: Factors | None = None) -> int:
        """Count the parameters at these widths: the twin's, or the dense layer's without
        ``factors``."""
        weight = prod(widths) if factors is None else factors["weight"].params
        return weight + (widths[1] if has_bias(module) else 0)

    def buffers(self, module: Any, widths: Widths) -> int:
        """Count the numbers that a twin holds beside its parameters."""
        return 0

    def macs(self, module: Any, widths: Widths, factors: Factors, shapes: Sequence[Shape]) -> int:
        """Predict the twin's multiply-adds over calls with inputs of these (old) shapes."""
        return sum(prod(shape[:-1]) for shape in shapes) * bilinear_macs(factors["weight"])

    def unseen_macs(self, module: Any, shape: Shape) -> int:
        """Return the multiply-adds of a dense call, where torch's counter never sees them."""
        return 0

    def operations(
        self, module: Any, widths: Widths, factors: Factors, shape: Shape
    ) -> tuple[Counts, Counts] | None:
        """Count what the time of a call on an input of this shape hangs on, dense and converted;
        None where nothing is known. One object for both: the twin runs as the dense layer does.

        ``speed.json`` holds the price of each quantity, by the kind's name.
        """
        return None

    def output_norms(self, module: Any) -> Tensor | None:
        """Return the squared norm (K) of the weights of each output, in float64; None where they
        cannot be told apart."""
        norms: Tensor = module.weight.double().square().flatten(1).sum(1)
        return norms

    # The twin

    def build(
        self, module: Any, widths: Widths, factors: Factors, device: torch.device | str
    ) -> nn.Module:
        """Make the twin of these widths with fresh random weights, in the module's dtype.

        Raises:
            FactorError: factors that do not fit the widths.
        """
        names = self.twin.FIELDS
        fields = {**fields_of(module, names), **self.sizes(module, widths)}
        dtype = next(module.parameters()).dtype
        given = factors if self.several else factors["weight"]
        twin: nn.Module = self.twin(**fields, factors=given, device=device, dtype=dtype)
        return twin

    def sizes(self, module: Any, widths: Widths) -> dict[str, Any]:
        """Return the constructor fields that the widths set."""
        return dict(zip(self.twin.FIELDS, widths, strict=False))

    def spread(self, module: Any, spread: Spread) -> dict[str, Tensor]:
        """Return the dense layer's tensors, by name, at the widened sizes."""
        wide = {"weight": spread.columns(spread.rows(module.weight))}
        if has_bias(module):
            wide["bias"] = spread.rows(module.bias)
        return wide

    @torch.no_grad()
    def fill(self, module: Any, twin: Any, spread: Spread) -> float:
        """Set the twin to the nearest Kronecker sum of the widened weights; return the relative
        Frobenius error."""
        changed = spread.inputs is not None or spread.outputs is not None
        if changed and not self.several and self.only_repeats(module, {"weight": twin.factors}):
            source = self.source(module)
            places = spread.indices(source)
            error: float = twin.fit_repeated_(spread.shares(source).flatten(1), *places)
        else:
            wide = self.spread(module, spread)
            error = twin.fit_(wide if self.several else wide["weight"])
        self.rest(module, twin, spread)
        return error

    def only_repeats(self, module: Any, factors: Factors) -> bool:
        """Return whether a widened weight need not be built to be fitted: its factors follow from
        the weight whose channels it repeats."""
        return False

    def source(self, module: Any) -> Tensor:
        """Return the weight as (K, C, *kernel)."""
        weight: Tensor = module.weight
        return weight

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
        if has_bias(module):
            twin.bias.copy_(spread.rows(module.bias))

    @torch.no_grad()
    def shift(self, twin: Any, role: str, index: int, change: Tensor) -> bool:
        """Add to the bias behind a matrix; return False where there is none."""
        if not has_bias(twin):
            return False
        twin.bias.add_(change.to(twin.bias))
        return True

    def carry(self, module: nn.Module, twin: nn.Module) -> None:
        """Carry over the training flag and which parameters are trained."""
        adopt(twin, module)

    # What the search for pairs and the fit to data see of a layer

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

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what ``rows`` and ``weights`` want to know of a call's arguments."""
        return args[0] if args else next(iter(kwargs.values()), None)

    def centred(self, module: Any, role: str) -> bool:
        """Return whether a bias takes up the mean error of a role's outputs."""
        return has_bias(module)

    @torch.no_grad()
    def add_bias(self, module: Any, role: str, changes: Sequence[Tensor]) -> None:
        """Add to the dense bias behind the matrices of a role, where that is one tensor."""
        bias = getattr(module, "bias", None)
        if isinstance(bias, Tensor):
            bias.add_(torch.cat(list(changes)).to(bias))  # of every group

    def rows(self, module: Any, x: Any, pick: Pick) -> dict[str, list[Tensor]]:
        """Return what each role's matrices multiply in a call on ``x``: rows (n, D), or indices
        (n,). A role's matrices are shared out evenly among the entries of its list."""
        return {"weight": [linear_rows(x, pick)]}

    def weights(self, module: Any, x: Any) -> dict[str, list[Tensor]]:
        """Return how much each output (K) of a role's matrices counts in a call on ``x``, as a
        mean square, in lists like those of ``rows``; nothing where all count alike."""
        return {}

    def slopes(self, module: Any, y: Any, pick: Pick) -> dict[str, list[Tensor]]:
        """Return rows (n, K) of a tensor like a call's output, by role, one entry for each matrix;
        nothing for roles whose outputs are not the layer's."""
        if self.several or self.bare or not isinstance(y, Tensor):
            return {}
        axis = self.channel_axis(module)
        rows = linear_rows(y if axis in (None, -1) else y.movedim(axis, -1), pick)
        return {"weight": list(rows.chunk(getattr(module, "groups", 1), 1))}


def has_bias(module: nn.Module) -> bool:
    """Return whether a layer adds a bias."""
    bias = getattr(module, "bias", None)
    return bias is not None and bias is not False
