"""What exporting a model gave: its files, how its layers stand in them, and how it compares."""

from __future__ import annotations

from pydantic import Field

from bp_convert.values.base import Number, Shown, Value
from bp_convert.values.literals import Form, Goal
from bp_convert.values.report import Latency


class ExportedLayer(Value):
    """How a bilinear layer stands in the file.

    Attributes:
        name: dotted name.
        kind: class of the layer.
        form: ``factors``: products at run time; ``built``: the file holds factors, and the
            runtime builds the weight when it loads it; ``dense``: the file holds the weight.
        micros: microseconds that a call takes, by form, at the largest batch; empty where
            nothing was measured.
    """

    name: str
    kind: str
    form: Form
    micros: dict[str, float] = Field(default_factory=dict)


class Export(Shown):
    """A model written for another runtime.

    Attributes:
        verdict: the sentence to remember.
        model: class of the model.
        source: where it came from.
        goal: what it was written for.
        runtime: what ran it, with its version; empty where it was not run.
        files: that were written.
        dense: what it is compared with, in words.
        size: bytes of the files.
        dense_size: bytes of the dense export; None where there is none.
        inputs: names and shapes as the file has them.
        free: axes that may have any length.
        layers: the bilinear ones.
        checked: on which inputs the outputs were compared with the model's.
        difference: the largest, relative to the largest output; None where it was not run.
        latency: one entry for each batch size that was measured.
        notes: remarks.
        seconds: that all of it took.
        versions: of what made it.
        machine: words for where it was made.
    """

    verdict: str = ""
    model: str
    source: str = ""
    goal: Goal
    runtime: str = ""
    files: tuple[str, ...]
    dense: str = ""
    size: int
    dense_size: int | None = None
    inputs: tuple[str, ...] = ()
    free: tuple[str, ...] = ()
    layers: tuple[ExportedLayer, ...] = ()
    checked: tuple[str, ...] = ()
    difference: Number | None = None
    latency: tuple[Latency, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float | None = None
    versions: dict[str, str] = Field(default_factory=dict)
    machine: str = ""

    def __repr__(self) -> str:
        name = self.model.rpartition(".")[2]
        return f"<Export of {name} to {self.goal}>\n{self.verdict}".rstrip()
