"""When the loss is no number: which step, which layer, and what to try."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.errors import TrainingError
from bp_convert.graph.tree import tensors_in

RUNAWAY = 1000.0  # times the largest of the first losses
FIRST = 10

TRY = (
    "try a lower lr (a tenth), warmup=0.1, clip=1.0, or precision=bf16 instead of fp16; look at "
    "the data of this step"
)


class Watchdog:
    """Notices losses that are no number, or that run away."""

    def __init__(self) -> None:
        self.level = 0.0
        self.seen = 0

    def healthy(self, loss: float) -> bool:
        """Tell whether training may go on."""
        if not math.isfinite(loss):
            return False
        if self.seen < FIRST:
            self.seen += 1
            self.level = max(self.level, loss)
            return True
        return loss <= RUNAWAY * max(self.level, 1e-3)


def diagnose(model: nn.Module, run: Callable[[], Any]) -> str:
    """Return where values that are not finite appear first, in words.

    Args:
        model: as it stands, gradients included.
        run: repeats the forward pass.
    """
    for name, parameter in model.named_parameters():
        if not _finite(parameter):
            return f"the first layer with non-finite values is {_layer(model, name)}: its {name}"
    first: list[str] = []

    def hook(name: str) -> Any:
        def look(module: nn.Module, _: Any, output: Any) -> None:
            if not first and not all(_finite(one) for one in tensors_in(output)):
                first.append(f"{name or 'the model'} ({type(module).__name__})")

        return look

    with ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(hook(name)))
        run()
    if first:
        return f"the first layer with non-finite values is {first[0]}: its output"
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not _finite(parameter.grad):
            layer = _layer(model, name)
            return f"the first layer with non-finite values is {layer}: the gradient of {name}"
    return "all weights and outputs are finite, so it is the loss that overflows"


def diverged(step: int, loss: float, words: str) -> TrainingError:
    """Return the error of a run that cannot go on."""
    if math.isfinite(loss):
        what = f"the loss has run away to {loss:.3g}"
    else:
        kind = "not a number" if math.isnan(loss) else "infinite"
        what = f"the loss or its gradient is {kind}"
    return TrainingError(
        where=f"step {step}",
        found=f"{what}; {words}",
        allowed="a finite loss",
        fix=TRY,
    )


def _layer(model: nn.Module, parameter: str) -> str:
    name = parameter.rpartition(".")[0]
    return f"{name or 'the model'} ({type(model.get_submodule(name)).__name__})"


def _finite(tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return True
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return bool(torch.isfinite(local).all())
