"""How much the outputs of layers count: second moments of the model's own slopes at them.

To second order an error e (K) of a layer's output changes what the model puts out by ``e^T G e``,
in squared distance, where G (K, K) is the mean of ``J^T J`` for the slope J of the model's output
by the layer's. One backward pass of a random sign for each number of the output gives a row whose
outer product is ``J^T J`` in the mean (Hutchinson, 1990). No labels, and no loss, are needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from bp_convert.calibration.moments import Moment, rows_wanted
from bp_convert.calibration.tap import Batch, Batches, run_quietly, token_mask
from bp_convert.errors import DataError
from bp_convert.graph.running import in_mode
from bp_convert.graph.tree import rows_in, tensors_in
from bp_convert.graph.walk import Site
from bp_convert.kron.metric import Metric
from bp_convert.seen.pick import Pick, linear_rows
from bp_convert.values.progress import Progress, unheard

LEAST = 0.02  # of the mean, what every direction counts: one sign is no certainty


@dataclass
class Slope:
    """What the slopes at a role's outputs are.

    Attributes:
        moments: second moments (K, K), one for each matrix.
        rows: outputs that an example makes, added up over the examples.
        examples: number of examples.
    """

    moments: list[Moment]
    rows: float = 0.0
    examples: int = 0

    @property
    def each(self) -> float:
        """How many outputs an example makes."""
        return self.rows / max(1, self.examples)

    def forms(self, matrices: int, shrink: float = 0.0) -> list[Metric]:
        """Return how much the outputs of each of so many matrices count."""
        found = [moment.metric(max(LEAST, shrink)) for moment in self.moments]
        return [found[index * len(found) // matrices] for index in range(matrices)]


Slopes = dict[tuple[str, str], Slope]  # by layer and role


def gather_slopes(
    model: nn.Module, sites: Sequence[Site], batches: Batches, progress: Progress = unheard
) -> Slopes:
    """Return the second moments of the slopes at the outputs of each role of each layer.

    Layers whose slopes cannot be had, as where a forward records no gradients, are missing.

    Args:
        model: a copy that may be written to.
    """
    found: Slopes = {}
    if not sites:
        return found
    examples = sum(rows_in(batch) for batch in batches)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    try:
        _add_all(found, model, sites, batches, examples, progress)
    except (DataError, RuntimeError):  # it writes on what gradients hang on, or has none
        return {}
    return {key: one for key, one in found.items() if all(m.count for m in one.moments)}


def _add_all(
    found: Slopes,
    model: nn.Module,
    sites: Sequence[Site],
    batches: Batches,
    examples: int,
    progress: Progress,
) -> None:
    with in_mode(model, training=False), torch.backends.cudnn.flags(enabled=False):
        for number, batch in enumerate(batches):
            progress("looking at what outputs count", number, len(batches))
            size, mask = rows_in(batch), token_mask(batch)
            for call, (site, slope) in enumerate(_slopes(model, sites, batch, number)):
                whole = site.kind.slopes(site.module, slope, Pick(slope.numel(), 0, mask))
                for role, ones in whole.items():
                    share = ceil(rows_wanted(ones[0].shape[1]) * size / examples)
                    pick = Pick(share, crc32(f"{site.name}:{number}:{call}".encode()))
                    if (site.name, role) not in found:
                        moments = [
                            Moment(one.shape[1], centred=False, name=site.name) for one in ones
                        ]
                        found[site.name, role] = Slope(moments, examples=examples)
                    known = found[site.name, role]
                    known.rows += len(ones[0])
                    for moment, one in zip(known.moments, ones, strict=True):
                        moment.add(linear_rows(one, pick))


def _slopes(
    model: nn.Module, sites: Sequence[Site], batch: Batch, number: int
) -> Iterator[tuple[Site, Tensor]]:
    """Run forward and back; yield the slope of each call of each layer."""
    made: list[tuple[Site, Tensor]] = []

    def note(site: Site) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> Any:
            if isinstance(output, Tensor) and output.requires_grad:
                made.append((site, output))
                return output.clone()  # what follows may write on it
            return None

        return hook

    handles = [model.get_submodule(one.name).register_forward_hook(note(one)) for one in sites]
    try:
        output = run_quietly(model, batch, number, gradients=True)
    finally:
        for handle in handles:
            handle.remove()
    ends = [one for one in tensors_in(output) if one.requires_grad]
    if not ends or not made:
        return
    signs = [_signs(one, number, token_mask(batch)) for one in ends]
    slopes = torch.autograd.grad(ends, [one for _, one in made], signs, allow_unused=True)
    for (site, _), slope in zip(made, slopes, strict=True):
        if slope is not None:
            yield site, slope


def _signs(output: Tensor, number: int, mask: Tensor | None) -> Tensor:
    """Return a random sign for each number of an output; zero for tokens that are padding."""
    generator = torch.Generator().manual_seed(number)
    signs = torch.randint(0, 2, output.shape, generator=generator, device="cpu") * 2.0 - 1
    if mask is not None and output.shape[:2] == mask.shape:
        signs = signs * mask.view(*mask.shape, *[1] * (output.dim() - 2)).cpu()
    return signs.to(output)
