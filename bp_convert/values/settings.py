"""What the user asks for. The planner is the only reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypedDict

from pydantic import Field, field_validator, model_validator

from bp_convert.values.base import Value, one_or_many
from bp_convert.values.factors import Pair
from bp_convert.values.literals import Allocation, Init, Method, Policy, Prefer, Sides, Store, Ways
from bp_convert.values.reconstruction import Reconstruct
from bp_convert.values.target import Target
from bp_convert.values.tensors import TensorSpec

Shrink = Literal["auto"] | Annotated[float, Field(ge=0, le=100)]
# An int is a number of Kronecker terms, a float in (0, 1) a share of the layer's parameters.
Rank = Annotated[int, Field(ge=1, strict=True)] | Annotated[float, Field(gt=0, lt=1)]


class Pairs(Value):
    """Factor pairs written out for one layer; the other policy is to let the planner choose.

    Attributes:
        out: the outputs as a product k1 * k2.
        inp: the inputs as a product d1 * d2; ``in`` in files.
    """

    out: Pair
    inp: Pair = Field(alias="in")


class LayerRule(Value):
    """What to do with the layers that ``match`` names. The first rule that matches wins.

    Attributes:
        match: glob on the dotted name, ``re:`` and a regular expression, or a type name.
        keep: leave these layers as they are.
        pairs: policy or explicit pairs.
        rank: number of terms, or a share of the layer's parameters.
        init: where the factors start from.
        floor: share of the layer's parameters that a target may not go below.
        store: how their weights are stored, also where they are kept.
        way: how they run where they are replaced, as ``Settings.ways``.
    """

    match: str
    keep: bool = False
    pairs: Policy | Pairs | None = None
    rank: Rank | None = None
    init: Init | None = None
    floor: Annotated[float, Field(gt=0, le=1)] | None = None
    store: Store | None = None
    way: Ways | None = None

    @property
    def insists(self) -> bool:
        """True where the rule asks for a conversion, so that the speed guard steps aside."""
        return not self.keep and (self.pairs is not None or self.rank is not None)


class LatencyAt(Value):
    """What a target of latency is timed at.

    Attributes:
        batch: examples in a pass.
        threads: of torch; None takes those that it has.
        device: where the model runs, such as ``cpu`` or ``cuda``.
    """

    batch: Annotated[int, Field(ge=1)] = 1
    threads: Annotated[int, Field(ge=1)] | None = None
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"


class Settings(Value):
    """The whole request.

    Attributes:
        alpha: widening of what each layer puts out (paper, section III-C):
            convolutions by alpha squared, all others by alpha.
        rank: number of Kronecker terms R, or a share of each layer's parameters in (0, 1).
        pairs: ``fast`` takes the cheapest layout within 10 % of the nearest-square pair's
            parameters, ``paper`` the nearest-square pair itself.
        target: limits that the converted model keeps; pairs and terms are then chosen layer by
            layer for the least error within them, and ``rank`` is not read.
        method: what a target is met with: low-rank terms alone (``svd``) or all Kronecker sums
            (``kron``), fitted to the weights or, with ``-data``, to what the layers see.
        store: how weights are stored, of factors and of layers that stay dense: ``int8`` with a
            scale for each row, ``int4`` and ``int3`` with one for 32 numbers, ``bf16``, ``fp16``,
            or ``fp32``, as they are. None stores them as they are too, but for a target of
            ``size``: its bytes are then spent on the best bits of each layer as well.
        sides: what errors are measured in where there is data: ``inputs``, by what each layer sees;
            ``both``, by what the model makes of its outputs as well; ``auto`` takes for each
            group of layers what is nearer to the source on examples held out of calibration.
        allocation: what a target is spent by: ``measured``, by what perturbing each layer did to
            the output; ``uniform``, all layers alike; ``auto`` tries several ways on examples held
            out of calibration and takes the best.
        shrink: how much of their mean variance is added to what layers see, so that directions
            that the data hardly shows count more; ``auto`` tries several on examples held out.
        groups: let layers that get the same inputs share a factor, where that is nearer to the
            source on examples held out.
        prefer: what a target gives for time: ``quality`` no error at all, ``balanced`` up to 1.1
            times the squared error to stay as fast as before and 1.02 times to be faster, ``speed``
            up to 1.5 times the error to be as fast as can be. By estimates.
        latency_at: what a target of ``latency`` is timed at: batch, threads, device.
        init: ``warm`` starts from the trained weights; ``random`` from noise; ``mixed`` draws the
            factors, at the size of their weights, and keeps trained biases, norms and other
            layers; ``auto`` takes ``mixed`` for single terms of a widened model, else ``warm``.
        include: patterns of layers to convert; empty means all.
        exclude: patterns of layers to leave alone.
        layers: rules for single layers.
        convert_head: convert every layer that makes the model's output; without it those stay
            that hold little of the weights, or would lose more than others (without a target).
        convert_anyway: convert layers that the speed guard would keep.
        ways: how replaced layers run in eval mode without gradients: ``factored``; ``expanded``, on
            the dense weight, built once (the file stays small, memory does not); ``auto`` expands
            those that are predicted to be slower than their dense layer otherwise, but none where
            a target limits multiply-adds, alpha widens or pairs are the paper's.
        keep_parametrized: leave layers as they are that compute their weight, such as by weight
            norm, by a pruning mask or in a forward of their own; by default the weight that they
            have in eval mode is factored and the computation dropped.
        merge_adapters: merge LoRA adapters into their layers first; by default the base layers are
            converted and the adapters kept beside them.
        reconstruct: tune blocks to the source's outputs on the calibration data: ``off``, or how;
            None does so where enough examples are held out to judge it and it takes some minutes
            at most.
        inputs: example inputs; empty lets them be inferred.
        seed: of every random start.
    """

    alpha: Annotated[float, Field(gt=0)] = 1.0
    rank: Rank = 1
    pairs: Policy = "fast"
    target: tuple[Target, ...] = ()
    method: Method = "auto"
    store: Store | None = None
    sides: Sides = "auto"
    allocation: Allocation = "auto"
    shrink: Shrink = "auto"
    groups: bool = True
    prefer: Prefer = "balanced"
    latency_at: LatencyAt = LatencyAt()
    init: Init = "auto"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    layers: tuple[LayerRule, ...] = ()
    convert_head: bool = False
    convert_anyway: bool = False
    ways: Ways = "auto"
    keep_parametrized: bool = False
    merge_adapters: bool = False
    reconstruct: Reconstruct | Literal["off"] | None = None
    inputs: tuple[TensorSpec, ...] = ()
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    _lists = field_validator("target", "inputs", "include", "exclude", mode="before")(one_or_many)

    @field_validator("reconstruct", mode="before")
    @classmethod
    def _as_a_switch(cls, value: Any) -> Any:
        """Read on and off, which YAML takes for true and false."""
        if value is True or value == "on":
            return Reconstruct()
        return "off" if value is False else value

    @property
    def fits_data(self) -> bool:
        """Whether factors follow the data where there is some."""
        return self.method not in ("svd", "kron")

    def open_ways(self, asked: Ways | None = None) -> Ways:
        """Return the ways that are open to a layer of this request.

        Args:
            asked: by a rule for it.
        """
        ways = asked or self.ways
        limited = any(one.quantity == "macs" for one in self.target)
        counted = limited or self.alpha != 1 or self.pairs == "paper"
        return "factored" if ways == "auto" and counted else ways

    @property
    def chooses_bits(self) -> bool:
        """Whether a target chooses how each layer is stored."""
        return self.store is None and any(one.quantity == "size" for one in self.target)

    @property
    def limits_latency(self) -> bool:
        """Whether a target limits the time of a pass."""
        return any(one.quantity == "latency" for one in self.target)

    @model_validator(mode="after")
    def _alpha_widens(self) -> Settings:
        if self.alpha < 1:
            raise ValueError("alpha widens layers: it must be at least 1")
        return self

    @model_validator(mode="after")
    def _one_target_each(self) -> Settings:
        quantities = [target.quantity for target in self.target]
        if len(set(quantities)) < len(quantities):
            raise ValueError("two targets for one quantity")
        if self.latency_at != LatencyAt() and "latency" not in quantities:
            raise ValueError("latency_at is for a target of latency, and there is none")
        if self.target and self.init in ("mixed", "random"):
            raise ValueError("a target chooses by the trained weights: init must be warm")
        ways = (self.ways, *(rule.way for rule in self.layers))
        if "expanded" in ways and "macs" in quantities:
            raise ValueError("expanded layers take the dense multiply-adds: ways must be factored")
        return self


class SettingsKeywords(TypedDict, total=False):
    """The fields of ``Settings`` as functions take them by keyword, but for ``inputs``."""

    alpha: float
    rank: int | float
    pairs: Policy
    target: str | Target | Sequence[str | Target]
    method: Method
    store: Store | None
    sides: Sides
    allocation: Allocation
    shrink: Literal["auto"] | float
    groups: bool
    prefer: Prefer
    latency_at: LatencyAt | Mapping[str, Any]
    init: Init
    include: str | Sequence[str]
    exclude: str | Sequence[str]
    layers: Sequence[LayerRule | Mapping[str, Any]]
    convert_head: bool
    convert_anyway: bool
    ways: Ways
    keep_parametrized: bool
    merge_adapters: bool
    reconstruct: Reconstruct | Mapping[str, Any] | Literal["off", "on"] | bool | None
    seed: int
