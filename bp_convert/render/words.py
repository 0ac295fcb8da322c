"""The lines that every form of the report shares, and a training run in words."""

from __future__ import annotations

from collections import Counter
from math import isfinite

from bp_convert.render.numbers import change, layers, percent, short, size
from bp_convert.values.factors import FactorSpec
from bp_convert.values.plan import EXPANDED, LayerPlan, Totals, grouped
from bp_convert.values.reconstruction import BlockResult, Reconstructed
from bp_convert.values.report import Latency, Report, Score, Verification
from bp_convert.values.training import Trained

CLASSES = 12  # of modules without a kind that are named where not all are asked for

VAST = 10.0  # relative difference of outputs beyond which its size says nothing


def pairs_of(layer: LayerPlan) -> str:
    """Write a layer's factorisation as out|in, such as 16x32|24x24."""
    specs = list(layer.factors.values())
    if not specs:
        return ""
    return _pair(specs[0]) + (f" +{len(specs) - 1}" if len(specs) > 1 else "")


def _pair(spec: FactorSpec) -> str:
    (k1, k2), (d1, d2) = spec.out, spec.inp
    return f"{k1}x{k2}|{d1}x{d2}"


def totals(report: Report) -> list[tuple[str, str, str, str]]:
    """Return (what, before, after, change) for each total."""
    found: list[tuple[str, str, str, str]] = []
    every: list[tuple[str, Totals | None]] = [
        ("parameters", report.plan.params),
        ("multiply-adds", report.plan.macs),
        ("size", report.plan.bytes),
    ]
    for name, total in every:
        if total is None:
            found.append((name, "?", "?", "not counted: no example input"))
        else:
            form = size if name == "size" else short
            found.append((name, form(total.before), form(total.after), change(total)))
    return found


def kept(report: Report) -> list[tuple[int, str, str]]:
    """Return (count, reason, an example) of the layers that stay dense, commonest first."""
    found: dict[str, list[str]] = {}
    for layer in report.layers:
        if layer.action != "replaced":
            stored = f"; stored in {layer.store}" if layer.store else ""
            found.setdefault(_plain(layer.reason) + stored, []).append(layer.name)
    groups = sorted(found.items(), key=lambda one: -len(one[1]))
    return [(len(names), reason, names[0]) for reason, names in groups]


def bits(report: Report) -> list[str]:
    """Say how layers are stored, where some are in few bits, and in how many bits a number is."""
    plan = report.plan
    if not plan.stored:
        return []
    found = Counter(
        ("factored" if layer.action == "replaced" else "dense", layer.store or "as before")
        for layer in plan.layers
    )
    parts = [f"{layers(count)} {how} in {store}" for (how, store), count in found.most_common()]
    each = 8 * plan.bytes.after / max(1, plan.params.after)
    return [
        ", ".join(parts).replace(" in as before", " as before"),
        f"{each:.1f} bits a parameter on average, scales and what stays included",
    ]


def others(report: Report, *, every: bool = False) -> list[str]:
    """Return a line for each class of modules that hold weights and have no kind, largest first.

    Args:
        every: one line a module.
    """
    total = report.plan.params.before
    if every:
        return [
            f"{one.name or 'the model itself'}: {one.kind}: "
            f"{_count(one.params[0], one.params[0] / total if total else 0)}: {one.reason}"
            for one in report.plan.others
        ]
    groups = grouped(report.plan.others, total)
    lines = [
        f"{len(one.names)} {one.kind}: {_count(one.params, one.share)}: {one.reason}"
        for one in groups[:CLASSES]
    ]
    if rest := groups[CLASSES:]:
        count = _count(sum(one.params for one in rest), sum(one.share for one in rest))
        lines.append(f"{len(rest)} further classes: {count}")
    return lines


def _count(params: int, share: float) -> str:
    plural = "" if params == 1 else "s"
    return f"{params:,} parameter{plural}, {percent(share)}"


def _plain(reason: str) -> str:
    """Drop what differs from layer to layer, so that one reason is one line."""
    if reason.startswith("shares "):
        return reason.split(" with ")[0] + " with another layer"
    return reason.split(" (predicted")[0]


def notes(report: Report) -> list[str]:
    """Return remarks on the model and, counted, on its layers."""
    counts = Counter(_plain(note) for layer in report.layers for note in layer.notes)
    counts.pop(EXPANDED, None)  # the table says so, and the plan's note
    asked = "starts from noise: as asked"
    lines = [f"{layers(count)}: {note}" for note, count in counts.most_common() if note != asked]
    if counts[asked]:
        lines.append(f"{layers(counts[asked])} from noise, as asked")
    return [*report.notes, *report.plan.notes, *lines]


def latency(one: Latency) -> str:
    """Say one measurement in a line."""
    if one.speedup >= 1:
        words = f"{one.speedup:.2f}x as fast"
    else:
        words = f"SLOWER: {1 / one.speedup:.2f}x the dense time"
    threads = "1 thread" if one.threads == 1 else f"{one.threads} threads"
    peak = ""
    if one.dense_peak_bytes and one.converted_peak_bytes:
        peak = f", peak {size(one.dense_peak_bytes)} to {size(one.converted_peak_bytes)}"
    return (
        f"batch {one.batch}: {one.dense_ms:.2f} ms to {one.converted_ms:.2f} ms "
        f"(spread {one.dense_spread_ms:.2f}, {one.converted_spread_ms:.2f}), {words}{peak}; "
        f"{one.device}, {threads}, {one.repeats} runs"
    )


def verification(report: Report) -> list[str]:
    """Say what running the converted model showed."""
    found = report.verification
    if found is None:
        return ["not run: no example input is known (--input)"]
    done = ["eval"] if found.ran_eval else []
    done += ["train"] if found.ran_train else []
    line = f"computes what its weights compute in plain layers, in {' and '.join(done)} mode"
    if found.gradients:
        line += ", gradients arrive where theirs do"
    line += ", source untouched"
    lines = [line]
    if found.output_error is not None or found.flips is not None:
        lines.append(f"outputs {outputs(found)} on {compared_on(found)}")
    return [*lines, *found.notes]


def outputs(found: Verification) -> str:
    """Say how far each kind of output is from the source's."""
    parts = []
    if (gap := found.output_error) is not None:
        far = f"differ by {percent(gap)}" if gap < VAST else f"differ by more than {percent(VAST)}"
        parts.append(far if isfinite(gap) else "are not finite")
    if found.flips is not None:
        parts.append(f"of integers change in {percent(found.flips)} of the places")
    return " and ".join(parts)


def compared_on(found: Verification) -> str:
    """Say what the outputs were compared on."""
    if not found.examples:
        return found.on
    return f"{found.examples:,} example{'' if found.examples == 1 else 's'} of {found.on}"


def score(one: Score) -> str:
    """Say one metric before and after."""
    return (
        f"{one.metric} {value_of(one, one.before)} before, {value_of(one, one.after)} after, on "
        f"{one.examples:,} examples that nothing was fitted to"
    )


def value_of(one: Score, value: float) -> str:
    """Write a value of a metric: a share as a percentage."""
    return f"{100 * value:.2f} %" if is_share(one.metric) else f"{value:.4g}"


def is_share(metric: str) -> bool:
    """Return whether a metric is a share of the examples, which people read in percent."""
    return metric == "accuracy" or metric.startswith("top")


def fitting(report: Report) -> list[str]:
    """Say what limits were kept, what error is expected, and what was fitted to."""
    lines = []
    if targets := report.plan.settings.target:
        lines.append(f"target {', '.join(map(str, targets))}")
    if (error := report.plan.error) is not None:
        on = "on calibration data" if report.calibration else "from the weights alone"
        lines.append(f"estimated error {error:.3g}, {on}")
    if tried := report.plan.tried:
        best = next(one for one in tried if one.taken)
        which = f"the best of {len(tried)} ways on examples held out"
        if best.error > min(one.error for one in tried):
            which = (
                f"of {len(tried)} ways on examples held out, what none beats by more than chance"
            )
        lines.append(f"{which}: {best.words}, {best.error:.3g}")
        lines += [f"  {one.words}, {one.error:.3g}" for one in tried if not one.taken]
    if report.calibration:
        lines.append(f"fitted to {report.calibration}")
    return lines


def blocks(found: Reconstructed | None) -> list[str]:
    """Say what tuning blocks to the source's outputs did, as a whole and block by block."""
    if found is None:
        return []
    if not found.blocks:
        return [f"not tuned: {found.reason}"]
    lines = []
    if found.before is not None and found.after is not None:
        error = f"error of the outputs {found.before:.3g} before, {found.after:.3g} after"
        lines.append(f"{error}, on {found.held:,} calibration examples that were held out")
    kept = sum(one.kept for one in found.blocks)
    resumed = f", {found.resumed} of them in an earlier run" if found.resumed else ""
    lines.append(
        f"{kept} of {len(found.blocks)} tuned to the source's outputs on {found.learnt:,} "
        f"examples, {found.seconds:,.1f} s{resumed}"
    )
    lines += [found.reason] if found.reason else []
    return lines + [f"  {_block(one)}" for one in found.blocks]


def _block(one: BlockResult) -> str:
    if one.before is None or one.after is None:
        return f"{one.name}: left as it was: {one.reason}"
    if not one.kept:
        return f"{one.name}: {one.before:.3g}, left as it was: {one.reason}"
    took = f"{one.epochs} epochs at {one.lr:g}, {one.seconds:,.1f} s"
    return f"{one.name}: {one.before:.3g} to {one.after:.3g} ({took})"


def trained_lines(trained: Trained | None) -> list[str]:
    """Return what a training run did, if any: each validation number, and what it took."""
    if trained is None:
        return []
    lines = []
    for key in sorted(trained.after, key=lambda one: one == "loss"):
        parts = [f"{_number(trained.teacher[key])} teacher"] if key in trained.teacher else []
        parts += [f"{_number(trained.before[key])} before"] if key in trained.before else []
        parts.append(f"{_number(trained.after[key])} after")
        lines.append(f"validation {key}: {', '.join(parts)}")
    lines.append(
        f"{trained.steps:,} steps, {trained.examples:,} examples, {trained.seconds:,.1f} s "
        f"({trained.examples_per_second:,.0f} examples a second); {trained.stopped}"
    )
    if trained.tried:
        tried = ", ".join(f"{loss:.4g} at {rate:g}" for rate, loss in trained.tried)
        lines.append(f"learning rate {trained.lr:g}; validation losses of short trials: {tried}")
    if trained.after:
        lines.append(f"weights of step {trained.best_step:,}, the lowest validation loss")
    memory = [
        f"{how} {count / 2**20:,.1f} MiB"
        for how, count in (
            ("estimated", trained.estimated_memory_bytes),
            ("measured", trained.peak_memory_bytes),
        )
        if count is not None
    ]
    if memory:
        lines.append(f"memory of a step: {', '.join(memory)}")
    if trained.resumed_from is not None:
        lines.append(f"resumed from step {trained.resumed_from:,}")
    return [*lines, *trained.notes]


def trained_verdict(trained: Trained) -> str:
    """Return one sentence about a training run."""
    key = next((one for one in trained.after if one != "loss"), "loss")
    if key not in trained.after:
        return f"Trained for {trained.steps:,} steps in {trained.seconds:,.0f} s."
    before = f" from {_number(trained.before[key])}" if key in trained.before else ""
    teacher = f" (teacher {_number(trained.teacher[key])})" if key in trained.teacher else ""
    return (
        f"Trained for {trained.steps:,} steps in {trained.seconds:,.0f} s: validation {key}"
        f"{before} to {_number(trained.after[key])}{teacher}."
    )


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:,.1f}"
