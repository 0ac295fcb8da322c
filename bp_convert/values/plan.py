"""What will be done to a model: a value that can be printed, saved, edited, compared, applied."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

from pydantic import Field

from bp_convert.values.base import Shown, Value
from bp_convert.values.factors import FactorSpec
from bp_convert.values.literals import Start, Store
from bp_convert.values.settings import Settings
from bp_convert.values.tensors import TensorSpec

NAMED = 0.01  # share of the parameters from which on a class of modules is worth a mention

Action = Literal["replaced", "widened", "kept"]
# How a replaced layer runs in eval mode: on its factors, or on the dense weight built of them once.
Way = Literal["factored", "expanded", "fused"]
EXPANDED = "runs expanded, on the dense weight"  # the notes of such layers
FUSED = "runs fused, both products in one kernel"


class LayerPlan(Value):
    """One layer that could be converted, and what becomes of it.

    Attributes:
        name: dotted name, the first under which the walker meets the layer.
        aliases: further names of the same module.
        kind: name of the Kind, such as ``Linear``.
        action: ``replaced`` by a bilinear twin, ``widened`` but left dense, or ``kept``.
        reason: why it is kept or left dense; empty for a replaced layer.
        notes: what the user should know, such as that the layer becomes slower.
        inputs: input width before and after.
        outputs: output width before and after.
        factors: one FactorSpec per weight matrix; empty unless replaced.
        shares: its factors that are another layer's, and whose: ``{"w2": "encoder.query"}``. They
            count once, are saved once, and are trained as one.
        init: where the new weights start from.
        store: how its weights are stored, kept or factored; None as the model has them.
        way: how a replaced layer runs in eval mode without gradients: ``factored``; ``expanded``,
            on the dense weight, which is built once and takes memory, not the file's; or ``fused``,
            in one kernel of a CUDA device.
        params: parameters before and after.
        shared: how many of them a layer before this one counts as well, before and after: tied
            weights, or a layer inside another.
        macs: multiply-adds of one example before and after, as it runs.
        error: estimated relative error of the layer's output, or without data of its weight;
            None where no target asked for it.
        sensitivity: how much the model's squared relative error grows with the layer's; None
            where no target asked for it.
        sides: what the layer's error is measured in where it is fitted to data: ``inputs``, or
            ``both`` what goes in and what the model makes of what comes out.
    """

    name: str
    aliases: tuple[str, ...] = ()
    kind: str
    action: Action
    reason: str = ""
    notes: tuple[str, ...] = ()
    inputs: tuple[int, int]
    outputs: tuple[int, int]
    factors: dict[str, FactorSpec] = Field(default_factory=dict)
    shares: dict[str, str] = Field(default_factory=dict)
    init: Start = "warm"
    store: Store | None = None
    way: Way = "factored"
    params: tuple[int, int]
    shared: tuple[int, int] = (0, 0)
    macs: tuple[int, int] = (0, 0)
    error: float | None = None
    sensitivity: float | None = None
    sides: Literal["inputs", "both"] = "inputs"

    @property
    def before(self) -> tuple[int, int]:
        """The widths of its input and output that it had."""
        return self.inputs[0], self.outputs[0]

    @property
    def after(self) -> tuple[int, int]:
        """The widths that it gets."""
        return self.inputs[1], self.outputs[1]

    @property
    def dense_macs(self) -> int:
        """Multiply-adds of one example on the dense weight at the widths that it gets."""
        return self.macs[0] * prod(self.after) // max(1, prod(self.before))

    @property
    def rank(self) -> int | None:
        """The most Kronecker terms of its matrices; None unless replaced."""
        return max((spec.rank for spec in self.factors.values()), default=None)


class OtherWeights(Value):
    """A module that holds parameters of its own and is no layer of a known kind: it stays.

    Attributes:
        name: dotted name, the first under which the model holds it; empty for the model itself.
        aliases: further names of the same module.
        kind: its class, such as ``GRU``.
        reason: why no kind speaks for it.
        params: parameters that nothing before it counts, before and after. They change where it
            follows a widened layer.
    """

    name: str
    aliases: tuple[str, ...] = ()
    kind: str
    reason: str
    params: tuple[int, int]


class OtherGroup(Value):
    """Modules of one class that stay for one reason.

    Attributes:
        kind: their class.
        reason: why no kind speaks for them.
        names: dotted names.
        params: their parameters before.
        share: of the model's parameters.
    """

    kind: str
    reason: str
    names: tuple[str, ...]
    params: int
    share: float


def grouped(others: Sequence[OtherWeights], total: int) -> tuple[OtherGroup, ...]:
    """Put together what is of one class and stays for one reason, the most parameters first.

    Args:
        total: parameters of the whole model.
    """
    found: dict[tuple[str, str], list[OtherWeights]] = {}
    for one in others:
        found.setdefault((one.kind, one.reason), []).append(one)
    groups = [
        OtherGroup(
            kind=kind,
            reason=reason,
            names=tuple(one.name for one in members),
            params=(count := sum(one.params[0] for one in members)),
            share=count / total if total else 0.0,
        )
        for (kind, reason), members in found.items()
    ]
    return tuple(sorted(groups, key=lambda one: -one.params))


def largest(others: Sequence[OtherWeights], total: int, most: int = 3) -> str:
    """Name the classes that hold most of a model's parameters, with their shares; those of less
    than a hundredth are left out.

    Args:
        total: parameters of the whole model.
    """
    groups = [one for one in grouped(others, total) if one.share >= NAMED]
    shares = [f"{len(one.names)} {one.kind} ({100 * one.share:.0f} %)" for one in groups[:most]]
    return ", ".join(shares).replace(" %)", " % of the parameters)", 1)


class Resize(Value):
    """A parameter or buffer of a follower that changes shape, such as a norm's scale.

    Attributes:
        name: dotted state name.
        before: shape before.
        after: shape after.
    """

    name: str
    before: tuple[int, ...]
    after: tuple[int, ...]


class AttrChange(Value):
    """A plain attribute of a module that changes with the widths, such as ``num_features``."""

    module: str
    attr: str
    before: int | tuple[int, ...]
    after: int | tuple[int, ...]


class Totals(Value):
    """Before and after of one count over the whole model."""

    before: int
    after: int

    @property
    def ratio(self) -> float:
        return self.after / self.before if self.before else 1.0


class Tried(Value):
    """A way of choosing that was tried on examples held out of calibration.

    Attributes:
        words: what it is.
        error: relative error of the model's output there, its layers fitted roughly.
        taken: whether it is what the plan goes by.
    """

    words: str
    error: float
    taken: bool = False


class Plan(Shown):
    """Everything that surgery needs, and everything that the tool declines to do, with reasons.

    Attributes:
        format: version of this form.
        model: class of the source model.
        fingerprint: hash of the source's state names, shapes and dtypes.
        settings: the request that led here; for information, surgery does not read it.
        inputs: the example inputs on which widths were found.
        assumed: how the inputs came about, where they were not given.
        layers: every layer that could be converted, in the model's order.
        others: every other module that holds parameters. With the layers they are all of the
            model's: ``params`` of both, less what layers share, add up to the model's.
        resizes: followers' tensors that change shape.
        attrs: followers' attributes that change.
        params: unique parameters of the whole model.
        macs: multiply-adds of one example through the whole model; None where not countable.
        bytes: size of all unique parameters and buffers, as they are stored.
        error: estimated relative error of the output; None where no target asked for it.
        calibration: the data that the choice was made on; empty for the weights alone.
        tried: what was tried on examples held out of calibration, in the order of trying.
        shrink: how much of their mean variance is added to what layers see.
        notes: what concerns the whole model.
    """

    format: Literal[1] = 1
    model: str
    fingerprint: str
    settings: Settings
    inputs: tuple[TensorSpec, ...]
    assumed: str = ""
    layers: tuple[LayerPlan, ...]
    others: tuple[OtherWeights, ...] = ()
    resizes: tuple[Resize, ...] = ()
    attrs: tuple[AttrChange, ...] = ()
    params: Totals
    macs: Totals | None = None
    bytes: Totals
    error: float | None = None
    calibration: str = ""
    tried: tuple[Tried, ...] = ()
    shrink: float = 0.0
    notes: tuple[str, ...] = ()

    def layer(self, name: str) -> LayerPlan | None:
        """Return the plan of the layer with this name or alias."""
        for one in self.layers:
            if name == one.name or name in one.aliases:
                return one
        return None

    def sharers(self, name: str) -> tuple[LayerPlan, ...]:
        """Return the layers that share factors of this one."""
        return tuple(one for one in self.layers if name in one.shares.values())

    @property
    def in_short(self) -> str:
        """What becomes of the model, in a line."""
        return (
            f"{self.model.rpartition('.')[2]}: {len(self.converted)} of {len(self.layers)} layers "
            f"replaced, {self.params.before:,} to {self.params.after:,} parameters"
        )

    def __repr__(self) -> str:
        return f"<Plan of {self.in_short}>"

    @property
    def converted(self) -> tuple[LayerPlan, ...]:
        """Layers that are replaced by a bilinear twin."""
        return tuple(one for one in self.layers if one.action == "replaced")

    @property
    def stored(self) -> tuple[LayerPlan, ...]:
        """Layers whose weights are stored in other bits than the model has them."""
        return tuple(one for one in self.layers if one.store is not None)

    @property
    def changes(self) -> bool:
        """Whether it gives anything but a copy."""
        return bool(self.converted or self.resizes or self.stored)
