"""Examples that nothing is fitted to, and how far a model is from its source on them."""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.calibration.tap import Batches, run_quietly, token_mask
from bp_convert.graph.running import in_mode
from bp_convert.graph.tree import rows_in, tensors_in
from bp_convert.kron.compute import to_compute

SHARE = 0.125  # of the batches, held out
FEWEST = 4  # batches; of fewer none is held out
MOST = 128  # examples that are held out, about


def parted(batches: Batches) -> tuple[Batches, Batches]:
    """Return what is fitted to, and what is held out to choose by: the last batches, or none."""
    if len(batches) < FEWEST:
        return batches, ()
    count = ceil(SHARE * len(batches))
    while count > 1 and sum(map(rows_in, batches[-count:])) > MOST:
        count -= 1
    return batches[:-count], batches[-count:]


class Yardstick:
    """Measures models by the outputs of their source on some batches.

    Args:
        source: a copy that may be run.
    """

    def __init__(self, source: nn.Module, batches: Batches) -> None:
        self.batches = batches
        self.examples = sum(rows_in(batch) for batch in batches)
        with in_mode(source, training=False):
            self.wanted = [_outputs(source, *one) for one in enumerate(batches)]
        spread = sum(_spread(outputs) for outputs in self.wanted)
        self.size = spread / max(1, self.examples)  # of an example's outputs about their mean

    def errors(self, model: nn.Module) -> Tensor | None:
        """Return the squared error of each example (n,), relative to the outputs' variance; None
        where no output can be compared."""
        found = []
        with in_mode(model, training=False):
            for number, batch in enumerate(self.batches):
                gaps = torch.zeros(rows_in(batch), dtype=torch.float64)
                compared = False
                outputs = _outputs(model, number, batch)
                for now, then in zip(outputs, self.wanted[number], strict=False):
                    if now.shape == then.shape:
                        compared = True
                        gaps += _each((now - then).square(), len(gaps))
                if not compared:
                    return None
                found.append(gaps)
        if not found or not self.size > 0:
            return None
        errors = torch.cat(found) / self.size
        return torch.nan_to_num(errors, nan=torch.inf, posinf=torch.inf)

    def error(self, model: nn.Module) -> float | None:
        """Return their mean."""
        errors = self.errors(model)
        return None if errors is None else float(errors.mean())


def _outputs(model: nn.Module, number: int, batch: Any) -> list[Tensor]:
    """Return a model's outputs, those of padding zero."""
    mask = token_mask(batch)
    found = []
    for one in tensors_in(run_quietly(model, batch, number)):
        if not one.is_floating_point():
            continue
        one = to_compute(one, torch.float64)
        if mask is not None and one.shape[:2] == mask.shape:
            one = one * mask.view(*mask.shape, *[1] * (one.dim() - 2)).to(one)
        found.append(one)
    return found


def _spread(outputs: list[Tensor]) -> float:
    total = 0.0
    for one in outputs:
        centre = one.mean(0) if one.dim() and len(one) > 1 else 0.0
        total += float((one - centre).square().sum())
    return total


def _each(squares: Tensor, examples: int) -> Tensor:
    """Return the sum for each example; shared out where the first axis is not theirs."""
    if squares.dim() and len(squares) == examples:
        return squares.flatten(1).sum(1) if squares.dim() > 1 else squares
    return squares.sum().expand(examples) / max(1, examples)
