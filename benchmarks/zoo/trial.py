"""One architecture in one mode: converted, compared, saved; and read again in another process."""

from __future__ import annotations

import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bp_convert
from benchmarks.zoo.compare import answers, gap, rounded, state_of, tolerance
from benchmarks.zoo.entry import Call, Entry
from bp_convert.errors import BpConvertError

FULL: dict[str, Any] = {"rank": 10**6, "convert_anyway": True, "convert_head": True}
# What each mode asks of bp_convert.convert; "none" only builds and runs.
MODES: dict[str, dict[str, Any]] = {
    "share": {"rank": 0.25, "convert_anyway": True},
    "alpha": {"alpha": 2},
    "target": {"target": "params=0.5"},
    "full": FULL,
}
OUTCOMES = ("converted", "kept", "refused", "failed", "wrong", "not reloadable")
SAME = 1e-6  # a reloaded model is the same numbers in the same order of operations
LONGEST = 2000  # characters of a message
Record = dict[str, Any]


class _StopError(Exception):
    """The trial has come to its end early; the record says why."""


class Trial:
    """What came of an entry in a mode, as a flat record.

    Args:
        folder: where the model is saved, and notes for the process that reads it.
    """

    def __init__(self, entry: Entry, mode: str, folder: Path) -> None:
        self.entry = entry
        self.mode = mode
        self.folder = folder
        self.record: Record = {"name": entry.name, "mode": mode, "outcome": "converted"}
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, refusal: str = "refused") -> Iterator[None]:
        """Time a step; an error in it ends the trial as a refusal or a failure."""
        (self.folder / "stage").write_text(name)
        start = time.process_time()
        try:
            yield
        except _StopError:
            raise
        except BpConvertError as problem:
            self.stop(refusal, name, problem)
        except Exception as problem:
            self.stop("failed", name, problem)
        finally:
            self.seconds[name] = round(time.process_time() - start, 3)

    def stop(self, outcome: str, stage: str, problem: BaseException | str) -> None:
        """End the trial."""
        text = str(problem)
        self.record |= {"outcome": outcome, "stage": stage, "text": text[:LONGEST]}
        if isinstance(problem, BaseException):
            self.record["error"] = type(problem).__name__
            self.record["place"] = _place(problem)
        raise _StopError

    def run(self) -> Record:
        """Run all that belongs into the first process."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._run()
        except _StopError:
            pass
        self.record["seconds"] = self.seconds
        return self.record

    def _run(self) -> None:
        with self.stage("build"):
            reference, source = self.entry.model(), self.entry.model()
            call = self.entry.call(reference)
            if self.entry.ran:
                answers(reference, call)
                answers(source, call)
            want, seen = answers(reference, call, self.entry.watch)
            before = state_of(source)
        if self.mode == "none":
            self._build_only(source, call, want)
            return
        with self.stage("convert"):
            asked = MODES[self.mode]
            small, report = bp_convert.convert(source, inputs=described(self.entry, call), **asked)
        self._count(report)
        small.eval()
        with self.stage("dense"):
            dense = bp_convert.to_dense(small)
            dense.eval()
        # Written before it runs: some models keep what a run leaves on them.
        with self.stage("save", "not reloadable"):
            name = self._save(small)
        with self.stage("compare"):
            if state_of(source) != before:
                self.stop("wrong", "compare", "the source is not what it was")
            got, felt = answers(small, call, self.entry.watch)
            self._judge(
                "to_dense", dense, call, answers(dense, call, self.entry.watch), (got, felt)
            )
            if self.mode == "full":
                self._judge("source", reference, call, (want, seen), (got, felt))
            torch.save({"call": call, "want": got, "seen": felt}, self.folder / "expected")
        self.record["file"] = name

    def _build_only(self, model: nn.Module, call: Call, want: Any) -> None:
        with self.stage("build"):
            again, _ = answers(model, call)
            other, _ = answers(self.entry.model(), self.entry.call(model, seed=5))
            apart, place = gap(want, again)
            if apart > SAME:
                self.stop("wrong", "build", f"two builds differ by {apart:.3g} in {place}")
            moved = gap(want, other)[0]
            self.record["varies"] = moved
            if moved < 1e-3:
                self.stop("wrong", "build", f"the output hardly depends on the input: {moved:.3g}")

    def _count(self, report: Any) -> None:
        actions = Counter(layer.action for layer in report.layers)
        self.record |= {
            "replaced": actions["replaced"],
            "widened": actions["widened"],
            "layers": len(report.layers),
            "params": [report.plan.params.before, report.plan.params.after],
            "reasons": dict(Counter(_general(layer) for layer in report.layers if layer.reason)),
            "weights": _weights(report.plan),
            "notes": [*report.notes, *(report.verification.notes if report.verification else ())],
            "checked": report.verification is not None,
            "verdict": report.verdict,
        }
        if not actions["replaced"] and not actions["widened"]:
            self.record["outcome"] = "kept"

    def _judge(self, name: str, plain: nn.Module, call: Call, want: Any, got: Any) -> None:
        """Compare outputs, or, where their length depends on rounding, what was watched; where a
        model blows rounding up they may be as far apart as that takes its plain layers."""
        place = 1 if self.entry.watch else 0
        apart, where = gap(want[place], got[place])
        self.record[f"gap_{name}"] = apart
        if self.entry.watch:
            self.record[f"outputs_{name}"] = gap(want[0], got[0])[0]
        if apart <= tolerance(want[place], plain):
            return
        moved = self.record[f"rounding_{name}"] = gap(
            want[place], rounded(plain, call, self.entry.watch)[place]
        )[0]
        if not apart <= moved:
            self.stop("wrong", "compare", f"differs from {name} by {apart:.3g} in {where}")

    def _save(self, small: nn.Module) -> str:
        """Save whole, or, where that is refused, as weights and plan."""
        try:
            bp_convert.save(small, self.folder / "small.pt")
            return "small.pt"
        except BpConvertError as problem:
            self.record["text"] = str(problem)[:LONGEST]
        bp_convert.save(small, self.folder / "small.safetensors")
        return "small.safetensors"


def described(entry: Entry, call: Call) -> Any:
    """Return what ``bp_convert`` is told of the input: texts, or the arguments of one call."""
    if entry.example is None:
        return list(entry.inputs)
    args, kwargs = call
    return kwargs if kwargs else args


def reload(entry: Entry, record: Record, folder: Path) -> Record:
    """Read a saved model in a process that did not make it; compare with what it put out there."""
    found: Record = {}
    start = time.process_time()
    trial = Trial(entry, record["mode"], folder)
    try:
        with warnings.catch_warnings(), trial.stage("reload", "not reloadable"):
            warnings.simplefilter("ignore")
            path = folder / record["file"]
            trusted = trust_for(path)
            make: Callable[[], nn.Module] | None = entry.model
            if path.suffix == ".pt":
                make = None
            model = bp_convert.load(path, model=make, trust=trusted)
            kept = torch.load(folder / "expected", weights_only=False)
            got = answers(model, kept["call"], entry.watch)
            want = kept["want"], kept["seen"]
            apart, where = gap(want[bool(entry.watch)], got[bool(entry.watch)])
            trial.record |= {"gap_reloaded": apart, "trusted": trusted}
            if not apart <= SAME:
                trial.stop("not reloadable", "reload", f"differs by {apart:.3g} in {where}")
    except _StopError:
        pass
    if trial.record["outcome"] == "failed":
        trial.record["outcome"] = "not reloadable"
    found = {key: value for key, value in trial.record.items() if key not in ("name", "mode")}
    if found["outcome"] == "converted":
        found["outcome"] = record["outcome"]
    seconds = {**record["seconds"], "reload": round(time.process_time() - start, 3)}
    return {**record, **found, "seconds": seconds}


def trust_for(path: Path) -> list[str]:
    """Return the packages that a file's error message would tell a user to trust."""
    from bp_convert.files.converted import needs_trust

    return sorted({name.partition(".")[0] for name in needs_trust(path)})


def _weights(plan: Any) -> dict[str, int]:
    """Count the model's numbers by what becomes of them: replaced, or why not."""
    counts: Counter[str] = Counter()
    for layer in plan.layers:
        counts[_general(layer) if layer.reason else "replaced"] += layer.params[0] - layer.shared[0]
    for other in plan.others:
        counts[_general(other)] += other.params[0]
    return dict(counts)


def _general(layer: Any) -> str:
    """Return a layer's reason without the numbers and names that are its own."""
    words = layer.reason.split(" [")[0].split()
    return " ".join("n" if any(c.isdigit() for c in word) else word for word in words)[:80]


def _place(problem: BaseException) -> str:
    """Return the innermost line of the package that an error came through."""
    frames = traceback.extract_tb(problem.__traceback__)
    inside = [one for one in frames if "/bp_convert/" in one.filename] or list(frames)
    last = inside[-1]
    return f"{'/'.join(Path(last.filename).parts[-2:])}:{last.lineno} {last.name}"
