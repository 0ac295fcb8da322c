"""Devices, precision and processes: Hugging Face accelerate, set up for one run.

Sharding is torch's ``fully_shard``, which accelerate's own FSDP version 2 calls: accelerate turns
its plugin on for accelerators only, and this way the same code runs on CPUs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from bp_convert.errors import TrainingError
from bp_convert.training.feed import Place
from bp_convert.values.training import Training

WHOLE = StateDictOptions(full_state_dict=True)  # each process gives all of a state


class Engine:
    """One run's Accelerator, and what sharding changes about it.

    Raises:
        TrainingError: the precision or sharding asked for is not to be had here.
    """

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
            self.accelerator = Accelerator(
                mixed_precision=settings.precision, cpu=not torch.cuda.is_available()
            )
        self.sharded = settings.shard
        if self.sharded and self.world == 1:
            raise TrainingError(
                where="shard=true",
                found="one process",
                allowed="several processes",
                fix="start it with torchrun --nproc_per_node N -m bp_convert finetune ...",
            )
        self.model: nn.Module
        self.optimizer: Any

    @property
    def world(self) -> int:
        """Number of processes."""
        return int(self.accelerator.num_processes)

    @property
    def place(self) -> Place:
        """Which process this is."""
        return Place(self.accelerator.process_index, self.world)

    @property
    def main(self) -> bool:
        """Whether this process writes files and speaks."""
        return bool(self.accelerator.is_main_process)

    @property
    def device(self) -> torch.device:
        """Where the model is trained."""
        return torch.device(self.accelerator.device)

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
        self.inner = model

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Take over the model that was placed, and its optimiser."""
        self.raw_optimizer = optimizer
        self.model = self.inner
        if not self.sharded:
            self.model = self.accelerator.prepare_model(self.inner)
            alone = isinstance(self.model, nn.parallel.DistributedDataParallel) != (self.world > 1)
            assert not alone, "processes would train each for itself"
        self.optimizer = self.accelerator.prepare_optimizer(optimizer, device_placement=False)

    def release(self) -> nn.Module:
        """Return the model as it was before ``prepare``, with all weights of it."""
        if self.sharded:
            return self.inner
        found: nn.Module = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        _unmark(found)
        return found

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which forward passes run."""
        context: contextlib.AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    @contextlib.contextmanager
    def quiet_gradients(self, last: bool) -> Iterator[None]:
        """Exchange gradients between processes only in the last pass of a step."""
        if self.sharded:
            self.inner.set_requires_gradient_sync(last)  # type: ignore[operator]
            yield
        elif last or self.world == 1:
            yield
        else:
            with self.accelerator.no_sync(self.model):
                yield

    def backward(self, loss: Tensor) -> None:
        """Add a loss's gradients."""
        self.accelerator.backward(loss)

    def norm(self, clip: float | None) -> float:
        """Clip the gradients; return their norm before."""
        self.accelerator.unscale_gradients(self.optimizer)
        parameters = [p for group in self.raw_optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        found: Tensor = torch.nn.utils.get_total_norm(gradients)
        if isinstance(found, DTensor):
            found = found.full_tensor()  # before it is compared: each process has a part of it
        if clip is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip, found)
        return float(found)

    @property
    def skipped(self) -> bool:
        """Whether the last step was left out because fp16 gradients overflowed."""
        return bool(self.accelerator.optimizer_step_was_skipped)

    def mean(self, value: float, weight: float = 1.0) -> float:
        """Return the weighted mean over processes."""
        if self.world == 1:
            return value
        pair = torch.tensor([value * weight, weight], dtype=torch.float64, device=self.device)
        total: Tensor = self.accelerator.reduce(pair, "sum")
        return float(total[0] / total[1])

    def wait(self) -> None:
        """Wait for the other processes."""
        self.accelerator.wait_for_everyone()

    def gathered(self, value: Any) -> list[Any]:
        """Return every process's value."""
        found: list[Any] = gather_object([value])
        return found

    def any(self, value: bool) -> bool:
        """Return whether it is true in any process."""
        return self.mean(float(value)) > 0

    def weights(self) -> dict[str, Any]:
        """Return the model's whole state, on the CPU, as a copy; every process takes part."""
        return _on_cpu(self.bare.state_dict())

    def set_weights(self, state: dict[str, Any]) -> None:
        """Put a whole state into the model."""
        if self.sharded:
            set_model_state_dict(self.inner, state, options=WHOLE)
        else:
            self.bare.load_state_dict(state)

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimiser's whole state, on the CPU; every process takes part."""
        return _on_cpu(self.raw_optimizer.state_dict())

    def set_optimizer_state(self, state: dict[str, Any]) -> None:
        """Put a whole state into the optimiser."""
        if self.sharded:
            names = {id(p): name for name, p in self.inner.named_parameters()}
            groups = self.raw_optimizer.param_groups
            order = [names[id(p)] for group in groups for p in group["params"]]
            named = [
                {**one, "params": [order[i] for i in one["params"]]}
                for one in state["param_groups"]
            ]
            parts = {order[i]: one for i, one in state["state"].items()}
            state = {"state": parts, "param_groups": named}
            set_optimizer_state_dict(self.inner, self.raw_optimizer, state, options=WHOLE)
        else:
            self.raw_optimizer.load_state_dict(state)

    @property
    def bare(self) -> nn.Module:
        """The user's module inside what accelerate made of it."""
        model = self.model
        found = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        assert isinstance(found, nn.Module)
        return found

    @property
    def scaler(self) -> Any:
        """The scaler of fp16 losses, or None."""
        return self.accelerator.scaler


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


def _on_cpu(state: Any) -> dict[str, Any]:
    """Copy nested plain values; tensors go to the CPU, tied ones stay tied."""
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

    found: dict[str, Any] = copy(state)
    return found
