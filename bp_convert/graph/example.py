"""Example inputs, made from their description."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bp_convert.graph.observe import Args, Kwargs
from bp_convert.values.tensors import TensorSpec


def make_inputs(
    model: nn.Module,
    specs: Sequence[TensorSpec],
    *,
    batch: int,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[Args, Kwargs]:
    """Draw inputs that fit ``specs``: normal numbers, or integers below the bound.

    Floating-point inputs take the model's own floating dtype where ``specs`` says float32, so
    that a half-precision model gets what it accepts.
    """
    generator = torch.Generator().manual_seed(seed)
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    bound = smallest_vocabulary(model)
    args: list[Tensor] = []
    kwargs: Kwargs = {}
    for spec in specs:
        tensor = _draw(spec, batch, bound, own, generator).to(device)
        if spec.name is None:
            args.append(tensor)
        else:
            kwargs[spec.name] = tensor
    return tuple(args), kwargs


def _draw(
    spec: TensorSpec, batch: int, bound: int, own: torch.dtype, generator: torch.Generator
) -> Tensor:
    shape = (batch, *spec.shape)
    dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        drawn = torch.randn(shape, generator=generator)
        return drawn.to(own if spec.dtype == "float32" else dtype)
    if dtype == torch.bool:
        return torch.ones(shape, dtype=dtype)
    return torch.randint(0, spec.high or bound, shape, generator=generator).to(dtype)


def smallest_vocabulary(model: nn.Module) -> int:
    """Return a bound for token ids that every word table of the model admits."""
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    return max(sizes, default=2)
