"""A model exported: traced, written, run where its runtime is installed, compared, timed."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.errors import ExportError, VerificationError
from bp_convert.exporting.axes import FreeAxes, free_axes
from bp_convert.exporting.choosing import all_fast, chosen
from bp_convert.exporting.forms import bilinear_layers, in_forms
from bp_convert.exporting.program import Program, traced
from bp_convert.exporting.runtime import Runtime
from bp_convert.exporting.runtimes import RUNTIMES
from bp_convert.files.atomic import check_output, write_all
from bp_convert.graph.clone import plain_clone
from bp_convert.graph.running import inference, run
from bp_convert.pages.export_page import verdict
from bp_convert.provenance import machine, versions
from bp_convert.ready import check_ready
from bp_convert.storage import is_marked, plan_of
from bp_convert.torch_private import tree_leaves
from bp_convert.tuning.clock import in_turn
from bp_convert.values.exported import Export, ExportedLayer
from bp_convert.values.literals import GOALS, Form, Goal
from bp_convert.values.progress import Progress, told
from bp_convert.values.report import Latency
from bp_convert.values.tensors import TensorSpec

BATCHES = (1, 8)  # that are compared and timed
CLOSE = 1e-4  # largest difference of outputs, relative to the largest output
TURNS, SECONDS = 60, 6.0  # of timing both models at one batch size
SLOWER = 1.05  # times of one model differ by so much from run to run
PACKAGES = ("torch", "onnx", "onnxscript", "onnxruntime", "openvino", "executorch")


def export(
    model: nn.Module,
    path: str | Path,
    *,
    to: Goal = "onnx",
    inputs: Sequence[TensorSpec | str] | TensorSpec | str | None = None,
    against: nn.Module | None = None,
    form: Form | None = None,
    sequences: bool = True,
    batches: Sequence[int] = BATCHES,
    force: bool = False,
    progress: Progress | bool | None = None,
    source: str = "",
) -> Export:
    """Write a model for another runtime; run it there, and compare it with its dense export.

    The batch axis is free, and so are the lengths of sequences where the model runs at another.
    Each bilinear layer stands in the form that is fastest in the runtime: as products on its
    factors, or with a weight that the runtime builds from them when it loads the file.

    Args:
        path: the file; its ending is the target's.
        to: ``onnx``, ``openvino``, ``executorch`` or ``torch-export``.
        inputs: example inputs, described as for ``convert``; None takes those of its plan, or
            infers them.
        against: the dense model to compare size and time with; None turns ``model`` back.
        form: of every bilinear layer, in place of choosing.
        sequences: leave the lengths of sequences free.
        batches: sizes at which outputs are compared and times are measured.
        force: replace existing files.
        progress: called with words, steps done and their number; True draws a bar.
        source: words for the report about where the model came from.

    Returns:
        What was written and measured.

    Raises:
        ExportError: a package is missing, or the model holds what the target cannot.
        CheckpointError: the file exists or cannot be written.
        VerificationError: the outputs there are not the model's; then nothing is written.
    """
    start = time.perf_counter()
    path = Path(path)
    if to not in GOALS:
        raise ExportError(
            where=f"to={to!r}", found=f"{to!r}", allowed=", ".join(GOALS), fix="give one of these"
        )
    target = RUNTIMES[to]
    check_output(path, force=force, suffixes=(target.suffix,))
    target.check_installed()
    check_ready(model)
    given = [inputs] if isinstance(inputs, str | TensorSpec) else [*(inputs or ())]
    described = [TensorSpec.parse(one) for one in given]
    if not described and is_marked(model):
        described = [*plan_of(model).inputs]
    with told(progress) as tell, tempfile.TemporaryDirectory(prefix="bp-convert-") as work:
        axes = free_axes(model, described, given=bool(given), sequences=sequences, most=target.most)
        job = _Work(model, axes, target, tuple(batches), Path(work), path.name, tell)
        found = job.made(form, against)
        value = Export(
            model=f"{type(model).__module__}.{type(model).__qualname__}",
            source=source,
            goal=to,
            runtime=target.runtime if target.can_run else "",
            files=tuple(str(path.with_name(one.name)) for one in found.files),
            dense="" if found.dense is None else "given" if against is not None else "turned back",
            size=_bytes(found.files),
            dense_size=None if found.dense is None else _bytes(found.dense),
            inputs=found.axes.shown(),
            free=found.axes.words,
            layers=found.layers,
            checked=found.checked,
            difference=found.difference,
            latency=found.latency,
            notes=found.notes,
            versions=versions(PACKAGES),
            machine=machine(),
        )
        writes = [(path.with_name(one.name), partial(_moved, one)) for one in found.files]
        write_all(writes, force=force)
    value = value.model_copy(update={"seconds": time.perf_counter() - start})
    return value.model_copy(update={"verdict": verdict(value)})


def _moved(made: Path, place: Path) -> None:
    shutil.move(made, place)


def _bytes(files: Sequence[Path]) -> int:
    return sum(one.stat().st_size for one in files)


@dataclass
class _Made:
    """One export of a model, and what running it showed."""

    files: list[Path]
    axes: FreeAxes
    layers: tuple[ExportedLayer, ...]
    notes: tuple[str, ...] = ()
    dense: list[Path] | None = None
    checked: tuple[str, ...] = ()
    difference: float | None = None
    latency: tuple[Latency, ...] = ()


@dataclass
class _Work:
    """What all steps of one export share."""

    model: nn.Module
    axes: FreeAxes
    target: Runtime
    batches: tuple[int, ...]
    folder: Path
    name: str
    tell: Progress

    def made(self, form: Form | None, against: nn.Module | None) -> _Made:
        """Choose forms, write, compare and time; once more where that was slower than dense."""
        layers = bilinear_layers(self.model)
        self.tell("choosing the form of each layer", 0, 4)
        if form is not None:
            self._check_form(form)
            picked = tuple(
                ExportedLayer(name=name, kind=type(one).__name__, form=form)
                for name, one in layers.items()
            )
        else:
            picked = chosen(self.model, self.axes, self.target, self.batches, self._sub("pieces"))
        self.tell("writing", 1, 4)
        made = self._written(picked, "converted")
        self._compare(made)
        if not layers and against is None:
            return made
        self.tell("writing the dense model", 2, 4)
        plain = plain_clone(self.model, apart=True) if against is None else against
        dense = self._traced(in_forms(plain, {}, self.target.special))
        made.dense = self.target.write(dense, self._sub("dense"), self.name)
        self.tell("timing", 3, 4)
        self._time(made)
        mixed = any(one.form != self.target.forms[1] for one in picked)
        if form is None and mixed and _worst(made.latency) > SLOWER:
            other = self._written(all_fast(picked, self.target), "fast")
            other.dense = made.dense
            self._compare(other)
            self._time(other)
            if _worst(other.latency) < _worst(made.latency):
                made = other
        return made

    def _check_form(self, form: Form) -> None:
        known = tuple(dict.fromkeys((*self.target.forms, "dense")))
        if form not in known:
            raise ExportError(
                where=f"--form {form}",
                found=f"a form that {self.target.goal} does not have",
                allowed=" or ".join(known),
                fix="give one of these, or leave --form out: then each layer's is chosen by time",
            )

    def _written(self, layers: tuple[ExportedLayer, ...], folder: str) -> _Made:
        forms = {one.name: one.form for one in layers}
        laid = in_forms(self.model, forms, self.target.special, lay_out=self.target.lays_out)
        program = self._traced(laid)
        files = self.target.write(program, self._sub(folder), self.name)
        return _Made(files, self.axes, layers, self.axes.notes)

    def _traced(self, laid: nn.Module) -> Program:
        """Trace, with fixed sequences where free ones are not possible."""
        try:
            program, self.axes = traced(laid, self.axes)
            return program
        except ExportError as problem:
            if not self.axes.lengths:
                raise
            fixed = self.axes.fixed(problem.found[:160])
            program, self.axes = traced(laid, fixed)
            return program

    def _compare(self, made: _Made) -> None:
        """Run the file at each batch size, and another length, and compare with the model."""
        if not self.target.can_run:
            made.notes = (
                *made.notes,
                f"not run: its runtime is not installed ({self.target.install})",
            )
            return
        ran = self.target.opened(made.files[0], torch.get_num_threads())
        checked = []
        worst = 0.0
        for place, size in enumerate(dict.fromkeys(self.batches)):
            shorter = place > 0 and bool(self.axes.lengths)
            args, kwargs = self.axes.draw(self.model, size, shorter=shorter, seed=place)
            with inference(self.model):
                wanted = [
                    one
                    for one in tree_leaves(run(self.model, args, kwargs))
                    if isinstance(one, Tensor)
                ]
            got = ran(_flat(args, kwargs))
            words = f"batch {size}" + (" at another length" if shorter else "")
            worst = max(worst, _difference(wanted, got, f"{self.name} at {words}"))
            checked.append(words)
        made.checked, made.difference = tuple(checked), worst
        own = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), None)
        close = CLOSE if own in (torch.float32, torch.float64, None) else 0.05
        if not worst <= close:
            raise VerificationError(
                where=self.name,
                found=f"outputs that differ from the model's by {worst:.1e} in "
                f"{self.target.runtime}; nothing was written",
                allowed=f"at most {close:g} of the largest output",
                fix="try --form dense; if that differs too, the difference is in the rest of the "
                "model: report it to the exporter",
            )

    def _time(self, made: _Made) -> None:
        if not self.target.can_run or made.dense is None:
            return
        threads = torch.get_num_threads()
        runs = [self.target.opened(one[0], threads) for one in (made.dense, made.files)]
        found = []
        for size in self.batches:
            given = _flat(*self.axes.draw(self.model, size))
            calls = [partial(one, given) for one in runs]
            for one in calls:
                one()  # so that neither pays for memory that it allocates once
            dense, ours = in_turn(calls, repeats=TURNS, seconds=SECONDS)
            found.append(
                Latency(
                    batch=size,
                    dense_ms=dense.middle,
                    converted_ms=ours.middle,
                    dense_spread_ms=dense.spread,
                    converted_spread_ms=ours.spread,
                    repeats=dense.count,
                    device="CPU",
                    threads=threads,
                )
            )
        made.latency = tuple(found)

    def _sub(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir()
        return folder


def _worst(latency: Sequence[Latency]) -> float:
    return max((one.converted_ms / one.dense_ms for one in latency), default=0.0)


def _flat(args: Any, kwargs: Any) -> list[Tensor]:
    return [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]


def _difference(wanted: Sequence[Tensor], got: Sequence[Tensor], where: str) -> float:
    """Return the largest difference, relative to the largest number of its output."""
    shapes = [[tuple(one.shape) for one in outputs] for outputs in (wanted, got)]
    if shapes[0] != shapes[1]:
        raise VerificationError(
            where=where,
            found=f"outputs of shapes {shapes[1]}; nothing was written",
            allowed=f"the model's: {shapes[0]}",
            fix="a size was taken for a constant: take sizes from the input in forward",
        )
    worst = 0.0
    for one, two in zip(wanted, got, strict=True):
        if not one.numel():
            continue
        a, b = one.detach().double(), two.detach().double()
        same = (a == b) | (a.isnan() & b.isnan())  # infinities of masks, too
        gap = torch.where(same, 0.0, (a - b).abs())
        finite = a[a.isfinite()]
        size = float(finite.abs().max()) if finite.numel() else 1.0
        worst = max(worst, float(gap.nan_to_num(float("inf")).max()) / (size or 1.0))
    return worst
