"""Batch norms told how the statistics of their inputs changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bp_convert.calibration.tap import Batches, run_quietly

LEAST, MOST = 0.25, 4.0  # bounds of the factor by which a variance is taken to have changed


@torch.no_grad()
def settle_norms(source: nn.Module, converted: nn.Module, batches: Batches) -> None:
    """Shift running means and scale running variances by what conversion changed, in place.

    The statistics of both models are taken on the same data, and only their difference is
    carried over: what the source learnt on its own training data stays, however few the
    examples. Norms are settled one after the other, as each changes what the next one gets.
    """
    names = [
        name
        for name, module in source.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    ]
    if not names:
        return
    before = _statistics(source, names, batches, settle=None)
    _statistics(converted, names, batches, settle=before)


def _statistics(
    model: nn.Module,
    names: list[str],
    batches: Batches,
    settle: dict[str, tuple[Tensor, Tensor]] | None,
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return mean and variance of each norm's inputs; with ``settle``, correct the norms so."""
    sums: dict[str, list[Any]] = {}
    modules = {name: model.get_submodule(name) for name in names}

    def hook(name: str) -> Any:
        def add(_: nn.Module, args: Any) -> None:
            x = args[0]
            axes = [axis for axis in range(x.dim()) if axis != 1]
            count = x.numel() // x.shape[1]
            held = sums.setdefault(name, [0, 0.0, 0.0])
            held[0] += count
            held[1] = held[1] + x.double().sum(axes)
            held[2] = held[2] + x.double().square().sum(axes)

        return add

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in modules.items()]
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        for batch in batches:
            run_quietly(model, batch)
    finally:
        for handle in handles:
            handle.remove()
        for module in training:
            module.training = True
    found = {}
    for name, (count, total, squares) in sums.items():
        mean = total / count
        found[name] = (mean, (squares / count - mean.square()).clamp(min=0))
    if settle is not None:
        for name, (mean, variance) in found.items():
            module = modules[name]
            assert isinstance(module, _BatchNorm)
            assert module.running_mean is not None
            assert module.running_var is not None
            old_mean, old_variance = settle[name]
            tiny = 1e-12 + 1e-6 * old_variance
            factor = ((variance + tiny) / (old_variance + tiny)).clamp(LEAST, MOST)
            module.running_mean.add_((mean - old_mean).to(module.running_mean.dtype))
            module.running_var.mul_(factor.to(module.running_var.dtype))
    return found
