"""Ways in which a model is run, each to be repeated on another; among them padding masks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bp_convert.graph.running import Args, Kwargs, fast_path, in_mode, run, same_draws
from bp_convert.graph.tree import map_tensors, tensors_in

# Names of forward's argument; True, or 1, marks what counts in the first, padding in the others.
_KEEPS = ("attention_mask",)
_PADS = ("src_key_padding_mask", "key_padding_mask", "padding_mask", "mask", "src_mask")


@dataclass(frozen=True)
class Way:
    """One way to run a model.

    Attributes:
        words: for messages.
        batch: inputs.
        training: the mode.
        fast: whether attention's fused path may be taken.
        changed: the weights are scaled first.
    """

    words: str
    batch: tuple[Args, Kwargs]
    training: bool = False
    fast: bool = True
    changed: bool = False

    def call(self, model: nn.Module, *, grad: bool = False) -> Any:
        """Run a model, on copies of the inputs and from the same random state each time."""
        args, kwargs = map_tensors(lambda t: t.clone(), self.batch)
        with (
            same_draws(0, model),
            fast_path(self.fast),
            in_mode(model, training=self.training),
            torch.set_grad_enabled(grad),
        ):
            return run(model, args, kwargs)


def masked(model: nn.Module, args: Args, kwargs: Kwargs) -> Iterator[tuple[Args, Kwargs]]:
    """Yield inputs with the end of the first sequence masked, in the forms that may be meant;
    none where forward has no such argument or no input that is a sequence."""
    parameters = inspect.signature(model.forward).parameters
    taken = set(list(parameters)[: len(args)])
    sequence = next((one for one in tensors_in((args, kwargs)) if one.dim() > 1), None)
    if sequence is None or sequence.shape[1] < 2:
        return
    for name in (*_KEEPS, *_PADS):
        if name not in parameters or name in taken:
            continue
        rows, steps = sequence.shape[:2]
        counts = torch.ones(rows, steps, dtype=torch.bool, device=sequence.device)
        counts[0, steps - max(1, steps // 4) :] = False
        keeps = (counts.long(), counts, counts.to(torch.get_default_dtype()))
        for mask in keeps if name in _KEEPS else (~counts, counts):
            yield args, {**kwargs, name: mask}
        return
