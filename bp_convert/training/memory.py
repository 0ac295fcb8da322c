"""What a training step holds in memory: estimated before the run, measured in it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from bp_convert.costs import peak_of_pass
from bp_convert.feeding.feed import Micro
from bp_convert.graph.clone import clone_to_meta
from bp_convert.graph.tree import tensors_in
from bp_convert.torch_private import storage_id, tree_leaves, tree_map_only
from bp_convert.training.recompute import recompute, starts


def estimate(
    model: nn.Module,
    micro: Micro,
    optimizer: torch.optim.Optimizer,
    *,
    teacher: nn.Module | None = None,
    averaged: bool = False,
    recomputed: bool = False,
) -> int | None:
    """Return the bytes that a step will hold: weights, gradients, optimiser states, the teacher,
    and what the forward pass keeps for the backward one, in the weights' own precision.

    The pass runs on the meta device, without any data. None where the model cannot run there.
    """
    kept = _kept_for_backward(model, micro, recomputed)
    if kept is None:
        return None
    trained = bytes_of(p for group in optimizer.param_groups for p in group["params"])
    states = round(trained * _states_of(optimizer))
    inputs = bytes_of(tensors_in((*micro.args, *micro.kwargs.values())))
    return held_by(model, teacher) + trained * (2 if averaged else 1) + states + kept + inputs


def held_by(*models: nn.Module | None) -> int:
    """Return the bytes of models' parameters and buffers."""
    held = [t for one in models if one is not None for t in (*one.parameters(), *one.buffers())]
    return bytes_of({id(t): t for t in held}.values())


def held_by_optimizer(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimiser's states, as they are now."""
    leaves = tree_leaves([dict(one) for one in optimizer.state.values()])
    return bytes_of(one for one in leaves if isinstance(one, Tensor))


def measured(run: Callable[[], Any], device: torch.device, held: int) -> tuple[Any, int | None]:
    """Run a step; return what it returns, and the most bytes in use meanwhile.

    On CUDA the allocator's own maximum; on a CPU what the profiler saw allocated at once, besides
    the ``held`` bytes of models and optimiser.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        result = run()
        torch.cuda.synchronize(device)
        return result, torch.cuda.max_memory_allocated(device)
    if device.type != "cpu":
        return run(), None
    kept: list[Any] = []
    gc.collect()  # or what is let go meanwhile would be counted
    peak = peak_of_pass(lambda: kept.append(run()))
    return kept[0], held + peak


def _kept_for_backward(model: nn.Module, micro: Micro, recomputed: bool) -> int | None:
    """Return the bytes that autograd keeps in a forward pass, parameters left out, and two of the
    largest gradients."""
    try:
        ghost = clone_to_meta(model)
        ghost.train()
        own = {storage_id(p) for p in [*ghost.parameters(), *ghost.buffers()]}
        args, kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), (micro.args, micro.kwargs))
        sizes: dict[int, int] = {}
        alive: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            key = storage_id(tensor)
            if key not in own and key not in sizes:
                sizes[key] = tensor.untyped_storage().nbytes()
                alive.append(tensor)  # or its storage's address would be used again
            return tensor

        if recomputed:
            for module in starts(recompute(ghost)):
                module.register_forward_pre_hook(
                    lambda _, inputs: [pack(one) for one in tensors_in(inputs)] and None
                )
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda t: t):
            ghost(*args, **kwargs)
    except Exception:  # user's code on meta tensors fails in its own ways
        return None
    # In the backward pass the gradient of a value and of what it was made from stand side by side.
    return sum(sizes.values()) + 2 * max(sizes.values(), default=0)


def _states_of(optimizer: torch.optim.Optimizer) -> float:
    """Return how many bytes of state an optimiser holds for each byte of a parameter, by a step
    on a small one."""
    dummy = nn.Parameter(torch.zeros(32, 32))
    dummy.grad = torch.zeros_like(dummy)
    own = ("name", "initial_lr")
    options = {key: one for key, one in optimizer.param_groups[0].items() if key not in own}
    try:
        kind: Any = type(optimizer)
        trial = kind([{**options, "params": [dummy]}])
        trial.step()
    except Exception:
        return 2.0  # as Adam's
    return held_by_optimizer(trial) / bytes_of([dummy])


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors; of one that is sharded, this process's part."""
    local = (one.to_local() if hasattr(one, "to_local") else one for one in tensors)
    return sum(one.numel() * one.element_size() for one in local)
