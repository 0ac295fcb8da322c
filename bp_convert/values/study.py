"""What probing a model, or sweeping over targets, found."""

from __future__ import annotations

from pydantic import Field

from bp_convert.values.base import Shown, Value
from bp_convert.values.factors import FactorSpec
from bp_convert.values.plan import Way
from bp_convert.values.report import Score
from bp_convert.values.settings import Settings


class ProbeRow(Value):
    """How far one weight can be compressed.

    Attributes:
        layer: dotted name.
        kind: name of the Kind.
        role: which of the layer's matrices; ``weight`` where it has one.
        shape: (K, D) of each.
        params: numbers in all matrices of the role.
        errors: relative error of the best pair at each of the probe's shares; None where no
            pair fits into the share.
        svd: the same for truncated SVD.
        best: pair and terms that are best at the middle share.
        saves: parameters that fall away at the probe's error.
        way: how the layer would run on the best pairs of its weights; None where they do not fit.
        reason: why it cannot be converted; empty where it can.
    """

    layer: str
    kind: str
    role: str = "weight"
    shape: tuple[int, int] = (0, 0)
    params: int
    errors: tuple[float | None, ...] = ()
    svd: tuple[float | None, ...] = ()
    best: FactorSpec | None = None
    saves: int = 0
    way: Way | None = None
    reason: str = ""


class Probe(Shown):
    """How far every layer of a model can be compressed, the largest saving first.

    Attributes:
        model: class of the model.
        source: where it came from.
        shares: of a layer's parameters, at which errors are given.
        error: relative error at which savings are counted.
        calibration: the data that errors are measured on; empty for the weights alone.
        rows: one for each weight.
        seconds: that it took.
        settings: everything else that was asked; None where that is not known.
        versions: of what made it.
        machine: words for where it was made.
    """

    model: str
    source: str = ""
    shares: tuple[float, ...]
    error: float
    calibration: str = ""
    rows: tuple[ProbeRow, ...]
    seconds: float = 0.0
    settings: Settings | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    machine: str = ""

    def __repr__(self) -> str:
        return f"<Probe of {self.model.rpartition('.')[2]}: {len(self.rows)} weights>"


class Point(Value):
    """One target met with one method.

    Attributes:
        target: as it was asked for.
        method: what it was met with.
        params: parameters that are left, and as a share.
        macs_share: multiply-adds that are left, as a share; None where not known.
        error: estimated relative error of the output.
        score: quality on held-out data; None where none was given.
        file: where the converted model was written; empty where it was not.
        notes: what proving the file has to say.
        out_of_reach: why there is no such point; empty where there is.
    """

    target: str
    method: str
    params: int = 0
    share: float = 0.0
    macs_share: float | None = None
    error: float | None = None
    score: Score | None = None
    file: str = ""
    notes: tuple[str, ...] = ()
    out_of_reach: str = ""


class Sweep(Shown):
    """A model converted to several targets.

    Attributes:
        model: class of the model.
        source: where it came from.
        params: parameters of the source.
        calibration: the data that factors were fitted to; empty for the weights alone.
        points: in the order of the targets, the chosen method's before truncated SVD's.
        verdict: which point is recommended, and why.
        recommended: its place among ``points``; None where none is.
        seconds: that it took.
        settings: everything else that was asked; None where that is not known.
        versions: of what made it.
        machine: words for where it was made.
    """

    model: str
    source: str = ""
    params: int
    calibration: str = ""
    points: tuple[Point, ...]
    verdict: str = ""
    recommended: int | None = None
    seconds: float = 0.0
    settings: Settings | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    machine: str = ""

    def __repr__(self) -> str:
        name = self.model.rpartition(".")[2]
        return f"<Sweep of {name}: {len(self.points)} points>\n{self.verdict}".rstrip()
