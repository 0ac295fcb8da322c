"""Devices, precision and processes: Hugging Face accelerate, set up for one run.

Sharding is torch's ``fully_shard``, which accelerate's own FSDP version 2 calls: accelerate turns
its plugin on for accelerators only, and this way the same code runs on CPUs.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from bp_convert.errors import TrainingError
from bp_convert.feeding.feed import Place
from bp_convert.values.training import Training

WHOLE = StateDictOptions(full_state_dict=True)  # each process gives all of a state


class Engine(Accelerator):  # type: ignore[misc]
    """One run's Accelerator, and what sharding changes about it.

    Attributes:
        place: which process this is.
        model: the user's module, which accelerate changes in place.
        wrapped: what is called in training: the same, or what exchanges its gradients.
        raw_optimizer, optimizer: the optimiser, and what accelerate made of it.

    Raises:
        TrainingError: the precision or sharding asked for is not to be had here.
    """

    model: nn.Module
    wrapped: nn.Module
    raw_optimizer: torch.optim.Optimizer
    optimizer: Any

    def __init__(self, settings: Training) -> None:
        AcceleratorState._reset_state()  # one run's precision must not bind the next
        if settings.precision == "fp16" and not torch.cuda.is_available():
            raise TrainingError(
                where="precision=fp16",
                found="no CUDA device",
                allowed="fp16 on a GPU; bf16 or no on a CPU",
                fix="take precision=bf16 or precision=no",
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            super().__init__(mixed_precision=settings.precision, cpu=not torch.cuda.is_available())
        self.place = Place(self.process_index, self.num_processes)
        self.sharded = settings.shard
        if self.sharded and self.place.world == 1:
            raise TrainingError(
                where="shard=true",
                found="one process",
                allowed="several processes",
                fix="start it with torchrun --nproc_per_node N -m bp_convert finetune ...",
            )

    def place_model(self, model: nn.Module) -> None:
        """Move a model to its device, and shard it where that is asked; before the optimiser is
        made, because sharding makes new parameters."""
        model.to(self.device)
        _unmark(model)
        if self.sharded:
            from torch.distributed.fsdp import fully_shard

            # One unit: a layer sharded for itself gives wrong gradients where an in-place
            # activation follows it, and its weights may be read without it being called.
            fully_shard(model, reshard_after_forward=True)
        self.model = model

    def wrap(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over the model that was placed, and its optimiser."""
        self.raw_optimizer = optimizer
        self.wrapped = self.model
        if not self.sharded:
            self.wrapped = self.prepare_model(self.model)
            together = isinstance(self.wrapped, nn.parallel.DistributedDataParallel)
            assert together == (self.place.world > 1), "processes would train each for itself"
        self.optimizer = self.prepare_optimizer(optimizer, device_placement=False)

    def release(self) -> nn.Module:
        """Return the model as it was before ``wrap``."""
        if not self.sharded:
            self.unwrap_model(self.wrapped, keep_fp32_wrapper=False)
            _unmark(self.model)
        return self.model

    def quiet_gradients(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """Exchange gradients between processes only in the last pass of a step."""
        if self.sharded:
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
        quiet: contextlib.AbstractContextManager[None] = (
            contextlib.nullcontext() if self.sharded or last else self.no_sync(self.wrapped)
        )
        return quiet

    def norm(self, clip: float | None) -> float:
        """Clip the gradients; return their norm before."""
        self.unscale_gradients(self.optimizer)
        parameters = self._trained()
        gradients = [p.grad for p in parameters if p.grad is not None]
        found: Tensor = torch.nn.utils.get_total_norm(gradients)
        if isinstance(found, DTensor):
            found = found.full_tensor()  # before it is compared: each process has a part of it
        if clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip, found)
        return float(found)

    def mean(self, value: float, weight: float = 1.0) -> float:
        """Return the weighted mean over processes."""
        if self.place.world == 1:
            return value
        pair = torch.tensor([value * weight, weight], dtype=torch.float64, device=self.device)
        total: Tensor = self.reduce(pair, "sum")
        return float(total[0] / total[1])

    def any(self, value: bool) -> bool:
        """Return whether it is true in any process."""
        return self.mean(float(value)) > 0

    def weights(self) -> dict[str, Any]:
        """Return the model's whole state, on the CPU, as a copy; every process takes part."""
        found: dict[str, Any] = on_cpu(self.model.state_dict())
        return found

    def set_weights(self, state: dict[str, Any]) -> None:
        """Put a whole state into the model."""
        if self.sharded:
            set_model_state_dict(self.model, state, options=WHOLE)
        else:
            self.model.load_state_dict(state)

    def set_optimizer_state(self, state: dict[str, Any]) -> None:
        """Put a whole state into the optimiser."""
        if not self.sharded:
            self.raw_optimizer.load_state_dict(state)
            return
        names = {id(p): name for name, p in self.model.named_parameters()}
        order = [names[id(p)] for p in self._trained()]
        named = [
            {**one, "params": [order[i] for i in one["params"]]} for one in state["param_groups"]
        ]
        parts = {order[i]: one for i, one in state["state"].items()}
        whole: dict[str, Any] = {"state": parts, "param_groups": named}
        set_optimizer_state_dict(self.model, self.raw_optimizer, whole, options=WHOLE)

    def _trained(self) -> list[Tensor]:
        return [p for group in self.raw_optimizer.param_groups for p in group["params"]]


def _unmark(model: nn.Module) -> None:
    """Take off the mark of a prepared model: it goes into copies and files, and accelerate does not
    prepare a marked one, so that its processes would train each for itself."""
    model.__dict__.pop("_is_accelerate_prepared", None)


def leave() -> None:
    """Part from the other processes, at the end of a program."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def as_shard(value: Tensor, like: Tensor) -> Tensor:
    """Return this process's part of a whole tensor, spread as another one is."""
    if not isinstance(like, DTensor):
        return value
    there = value.to(like.device)
    return distribute_tensor(there, like.device_mesh, like.placements)


def on_cpu(state: Any) -> Any:
    """Copy nested plain values; tensors go to the CPU whole, tied ones stay tied."""
    known: dict[tuple[int, int, Any], Tensor] = {}

    def copy(value: Any) -> Any:
        if isinstance(value, Tensor):
            if isinstance(value, DTensor):
                value = value.full_tensor()
            key = (value.data_ptr(), value.storage_offset(), tuple(value.shape))
            if not value.numel() or key not in known:
                known[key] = value.detach().cpu().clone()
            return known[key]
        if isinstance(value, dict):
            return {key: copy(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(copy(one) for one in value)
        return value

    return copy(state)
