"""What will be done to a model: a value that can be printed, saved, edited, compared, applied."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from bp_convert.values.base import Value
from bp_convert.values.factors import FactorSpec
from bp_convert.values.settings import Init, Settings
from bp_convert.values.tensors import TensorSpec

Action = Literal["replaced", "widened", "kept"]


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
        init: where the new weights start from.
        params: parameters before and after.
        macs: multiply-adds of one example before and after.
        error: estimated relative error of the layer's output, or without data of its weight;
            None where no target asked for it.
        sensitivity: how much the model's squared relative error grows with the layer's; None
            where no target asked for it.
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
    init: Init = "warm"
    params: tuple[int, int]
    macs: tuple[int, int] = (0, 0)
    error: float | None = None
    sensitivity: float | None = None


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


class Plan(Value):
    """Everything that surgery needs, and everything that the tool declines to do, with reasons.

    Attributes:
        format: version of this form.
        model: class of the source model.
        fingerprint: hash of the source's state names, shapes and dtypes.
        settings: the request that led here; for information, surgery does not read it.
        inputs: the example inputs on which widths were found.
        assumed: how the inputs came about, where they were not given.
        layers: every layer that could be converted, in the model's order.
        resizes: followers' tensors that change shape.
        attrs: followers' attributes that change.
        params: unique parameters of the whole model.
        macs: multiply-adds of one example through the whole model; None where not countable.
        bytes: size of all unique parameters and buffers.
        error: estimated relative error of the output; None where no target asked for it.
        calibration: the data that the choice was made on; empty for the weights alone.
        notes: what concerns the whole model.
    """

    format: Literal[1] = 1
    model: str
    fingerprint: str
    settings: Settings
    inputs: tuple[TensorSpec, ...]
    assumed: str = ""
    layers: tuple[LayerPlan, ...]
    resizes: tuple[Resize, ...] = ()
    attrs: tuple[AttrChange, ...] = ()
    params: Totals
    macs: Totals | None = None
    bytes: Totals
    error: float | None = None
    calibration: str = ""
    notes: tuple[str, ...] = ()

    def layer(self, name: str) -> LayerPlan | None:
        """Return the plan of the layer with this name or alias."""
        for one in self.layers:
            if name == one.name or name in one.aliases:
                return one
        return None

    @property
    def converted(self) -> tuple[LayerPlan, ...]:
        """Layers that are replaced by a bilinear twin."""
        return tuple(one for one in self.layers if one.action == "replaced")
