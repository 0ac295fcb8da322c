"""Which tensors of a model a plan stores in few bits."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from bp_convert.bits.grid import Form, form_of, nbytes, takes
from bp_convert.values.plan import Plan


def stored_forms(model: nn.Module, plan: Plan) -> dict[str, Form]:
    """Return how tensors are stored by each of their names; those that are left out stay as they
    are.

    Args:
        model: converted by ``plan``.
    """
    return {
        name: form
        for name, tensor, store in _weights(model, plan)
        if (form := form_of(store, tensor)) is not None
    }


def stored_bytes(model: nn.Module, plan: Plan) -> int:
    """Count the bytes of unique parameters and buffers as they are stored."""
    stores = {id(tensor): store for _, tensor, store in _weights(model, plan)}
    held = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    return sum(nbytes(stores.get(key), one) for key, one in held.items())


def _weights(model: nn.Module, plan: Plan) -> Iterator[tuple[str, Tensor, str]]:
    layers = [(name, layer) for layer in plan.stored for name in (layer.name, *layer.aliases)]
    for name, tensor in model.named_parameters(remove_duplicate=False) if layers else ():
        for owner, layer in layers:
            if not owner or name == owner or name.startswith(f"{owner}."):
                yield name, tensor, str(layer.store)


def can_be_stored(module: nn.Module) -> bool:
    """Return whether a layer that is kept has weights whose values are its own to round."""
    parameters = dict(module.named_parameters())
    return any(map(takes, parameters.values())) and not any(
        "parametrizations." in name or type(one).__name__ not in ("Parameter", "Tensor")
        for name, one in parameters.items()
    )
