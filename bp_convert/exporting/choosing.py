"""The form of each layer: what its runtime runs fastest, measured alone on its own inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.exporting.axes import FreeAxes
from bp_convert.exporting.forms import bilinear_layers, in_forms, is_recurrent
from bp_convert.exporting.runtime import Piece, Run, Runtime
from bp_convert.graph.running import inference, run
from bp_convert.tuning.clock import in_turn
from bp_convert.values.exported import ExportedLayer
from bp_convert.values.literals import Form

MARGIN = 1.03  # factors stay where they are at most this much slower: noise
CALLS, SECONDS = 40, 0.15  # of timing one layer in one form


@dataclass(frozen=True)
class Alike:
    """Layers of one class, factors and input shapes: one is timed for all."""

    names: tuple[str, ...]
    inputs: tuple[Tensor, ...]  # one of each batch size


def chosen(
    model: nn.Module, axes: FreeAxes, target: Runtime, batches: Sequence[int], folder: Path
) -> tuple[ExportedLayer, ...]:
    """Choose a form for each bilinear layer; by time where the runtime is there.

    Args:
        batches: sizes at which layers are timed.
        folder: that what is timed may be written to.
    """
    layers = bilinear_layers(model)
    small, fast = target.forms
    picked: dict[str, Form] = {
        name: fast if is_recurrent(one) else small for name, one in layers.items()
    }
    micros: dict[str, dict[str, float]] = {}
    groups = [] if not target.can_run else _groups(model, axes, batches)
    if groups:
        pieces = []
        for group in groups:
            first = group.names[0]
            for form in target.forms:
                alone = in_forms(
                    _Alone(layers[first]),
                    {"layer": form},
                    target.special,
                    lay_out=target.lays_out,
                )
                pieces.append(Piece(alone, group.inputs))
        threads = torch.get_num_threads()
        runs = target.opened_pieces(pieces, folder, threads)
        for place, group in enumerate(groups):
            one, two = _timed(runs[2 * place : 2 * place + 2], group.inputs)
            worst = max(a / b for a, b in zip(one, two, strict=True))
            for name in group.names:
                picked[name] = small if worst <= MARGIN else fast
                micros[name] = {small: one[-1], fast: two[-1]}
    return tuple(
        ExportedLayer(
            name=name,
            kind=type(one).__name__,
            form=picked[name],
            micros=micros.get(name, {}),
        )
        for name, one in layers.items()
    )


def all_fast(layers: Sequence[ExportedLayer], target: Runtime) -> tuple[ExportedLayer, ...]:
    """The same layers, each in the form that is as fast as the dense layer."""
    return tuple(one.model_copy(update={"form": target.forms[1]}) for one in layers)


class _Alone(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


def _groups(model: nn.Module, axes: FreeAxes, batches: Sequence[int]) -> list[Alike]:
    """Run the model at each batch size, and note what its layers are called with."""
    layers = {name: one for name, one in bilinear_layers(model).items() if not is_recurrent(one)}
    seen: dict[str, list[Tensor]] = {name: [] for name in layers}
    for size in batches:
        met: set[str] = set()

        def note(name: str, met: set[str] = met) -> Any:
            def hook(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
                if (
                    len(given) == 1
                    and isinstance(given[0], Tensor)
                    and not named
                    and name not in met
                ):
                    met.add(name)
                    seen[name].append(given[0].detach().clone())

            return hook

        hooks = [
            one.register_forward_pre_hook(note(name), with_kwargs=True)
            for name, one in layers.items()
        ]
        try:
            args, kwargs = axes.draw(model, size)
            with inference(model):
                run(model, args, kwargs)
        finally:
            for one in hooks:
                one.remove()
    groups: dict[object, Alike] = {}
    for name, inputs in seen.items():
        if len(inputs) != len(batches):
            continue
        layer: Any = layers[name]
        key = (type(layer), str(layer), *(one.shape for one in inputs))
        old = groups.get(key)
        groups[key] = (
            Alike((*old.names, name), old.inputs) if old else Alike((name,), tuple(inputs))
        )
    return list(groups.values())


def _timed(runs: Sequence[Run], inputs: Sequence[Tensor]) -> list[list[float]]:
    """Return, of each run, the microseconds on each input: the lower quartile, for what else runs
    on a machine only adds to them."""
    found: list[list[float]] = [[] for _ in runs]
    for x in inputs:
        calls = [partial(one, [x]) for one in runs]
        for one in calls:
            one()
        for times, lows in zip(in_turn(calls, repeats=CALLS, seconds=SECONDS), found, strict=True):
            lows.append(1e3 * times.low)
    return found
