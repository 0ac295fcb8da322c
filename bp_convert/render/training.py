"""A training run in words."""

from __future__ import annotations

from bp_convert.values.training import Trained


def quality(trained: Trained) -> list[str]:
    """Return each validation number: the teacher's, before, after."""
    lines = []
    for key in sorted(trained.after, key=lambda one: one == "loss"):
        parts = [f"{_number(trained.before[key])} before"] if key in trained.before else []
        parts.append(f"{_number(trained.after[key])} after")
        if key in trained.teacher:
            parts.insert(0, f"{_number(trained.teacher[key])} teacher")
        lines.append(f"validation {key}: {', '.join(parts)}")
    return lines


def work(trained: Trained) -> list[str]:
    """Return what was spent."""
    lines = [
        f"{trained.steps:,} steps, {trained.examples:,} examples, {trained.seconds:,.1f} s "
        f"({trained.examples_per_second:,.0f} examples a second); {trained.stopped}"
    ]
    if trained.after:
        lines.append(f"weights of step {trained.best_step:,}, the lowest validation loss")
    memory = []
    if trained.estimated_memory_bytes is not None:
        memory.append(f"estimated {trained.estimated_memory_bytes / 2**20:,.1f} MiB")
    if trained.peak_memory_bytes is not None:
        memory.append(f"measured {trained.peak_memory_bytes / 2**20:,.1f} MiB")
    if memory:
        lines.append(f"memory of a step: {', '.join(memory)}")
    if trained.resumed_from is not None:
        lines.append(f"resumed from step {trained.resumed_from:,}")
    return lines


def lines(trained: Trained) -> list[str]:
    """Return all of it."""
    return [*quality(trained), *work(trained), *trained.notes]


def verdict(trained: Trained) -> str:
    """Return one sentence."""
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
