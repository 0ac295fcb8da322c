"""What a training step holds in memory: estimated before the run, measured in it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from bp_convert.costs import peak_of_pass
from bp_convert.graph.clone import clone_to_meta
from bp_convert.graph.tree import tensors_in
from bp_convert.torch_private import storage_id, tree_leaves, tree_map_only
from bp_convert.training.feed import Micro
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
    trained = sum(_bytes(p) for group in optimizer.param_groups for p in group["params"])
    states = round(trained * _states_of(optimizer))
    fixed = held_by(model) + (0 if teacher is None else held_by(teacher))
    inputs = sum(_bytes(t) for t in tensors_in((*micro.args, *micro.kwargs.values())))
    return fixed + trained + states + (trained if averaged else 0) + kept + inputs


def held_by(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers."""
    return sum({id(t): _bytes(t) for t in [*model.parameters(), *model.buffers()]}.values())


def held_by_optimizer(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of an optimiser's states, as they are now."""
    leaves = tree_leaves([dict(one) for one in optimizer.state.values()])
    return sum(_bytes(one) for one in leaves if isinstance(one, Tensor))


def measured(
    run: Callable[[], Any],
    device: torch.device,
    held: int,
) -> tuple[Any, int | None]:
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
    options = {
        key: value
        for key, value in optimizer.param_groups[0].items()
        if key not in ("params", "name", "initial_lr")
    }
    try:
        kind: Any = type(optimizer)
        trial = kind([{"params": [dummy], **options}])
        trial.step()
    except Exception:
        return 2.0  # as Adam's
    return held_by_optimizer(trial) / _bytes(dummy)


def _bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel() * local.element_size())
