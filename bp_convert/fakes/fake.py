"""Running a model without its weights: tensors that have a shape and no data."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bp_convert.graph.running import Args, Kwargs, quiet_forward, same_draws
from bp_convert.graph.tree import map_tensors
from bp_convert.kinds import relative_of
from bp_convert.kinds.shapes import Dim
from bp_convert.torch_private import (
    FAKE_LOGGERS,
    PACK,
    UNPACK,
    FakeTensor,
    FakeTensorMode,
    ShapeEnv,
    arg_tree_leaves,
    enable_python_dispatcher,
    returns_tensor,
)

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
_ATEN = torch.ops.aten
# Of these torch checks the sizes only where there is data.
_ADDS = (
    _ATEN.index_add.default,
    _ATEN.index_add_.default,
    _ATEN.index_copy.default,
    _ATEN.index_copy_.default,
)
_MAKES_INTEGERS = 1 << 20  # numbers; larger ones are not worth making for real


class FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors, but integers stay real: ids, lengths, masks and what is computed from them.

    Models branch on such numbers and loop over them; weights and activations they only multiply.
    """

    def __init__(self, env: ShapeEnv | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True, shape_env=env)
        self.cache_enabled = env is None  # with symbols, keys cost more than they save

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_real(func, arg_tree_leaves(*args, **kwargs)):
            return func(*args, **kwargs)
        if func in _ADDS:
            _check_added(*args[:4])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def empty(self, shape: tuple[Dim, ...], dtype: torch.dtype) -> Tensor:
        """Make a tensor without data."""
        with self:
            return torch.empty(shape, dtype=dtype, device="cpu")

    def like(self, tensor: Tensor, shape: tuple[Dim, ...] | None = None) -> Tensor:
        """Make what stands for a model's tensor: integers for real, others without data."""
        if shape is None and tensor.dtype in _INTEGERS and tensor.device.type != "meta":
            return tensor.detach().cpu().clone()
        made = self.empty(tuple(tensor.shape) if shape is None else shape, tensor.dtype)
        return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made

    def inputs(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Make what stands for example inputs."""
        made: tuple[Args, Kwargs] = map_tensors(self.like, (args, kwargs))
        return made


def _check_added(given: Tensor, dim: int, index: Tensor, source: Tensor) -> None:
    """Ask that two tensors agree in all axes but the one along which rows are put into the first.

    Raises:
        RuntimeError: they do not.
    """
    for axis, (one, other) in enumerate(zip(given.shape, source.shape, strict=True)):
        if axis != dim % given.dim() and one != other:
            raise RuntimeError(f"rows of {tuple(source.shape)} do not fit {tuple(given.shape)}")


def _is_real(func: Any, leaves: list[Any]) -> bool:
    """Return whether an operation can run for real: it sees integers only, or makes a few."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if tensors:
        return all(
            not isinstance(t, FakeTensor) and t.dtype in _INTEGERS and t.device.type == "cpu"
            for t in tensors
        ) and not any(isinstance(leaf, torch.SymInt | torch.SymFloat) for leaf in leaves)
    if func.namespace != "aten" or not returns_tensor(func):
        return False
    numbers = [leaf for leaf in leaves if isinstance(leaf, int | float)]
    if any(isinstance(leaf, torch.SymInt | torch.SymFloat) for leaf in leaves):
        return False
    dtype = next((leaf for leaf in leaves if isinstance(leaf, torch.dtype)), None)
    device = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    small = all(abs(n) < _MAKES_INTEGERS for n in numbers)
    whole = all(isinstance(n, int) for n in numbers)
    counts = func.overloadpacket is torch.ops.aten.arange and whole
    return (
        small
        and bool(numbers)
        and (dtype in _INTEGERS or (dtype is None and counts))
        and (device is None or device.type == "cpu")
    )


class _Packing(TorchFunctionMode):
    """Pack and unpack sequences by shape; torch's own way needs plain sizes. Norms of batches and
    clipped rectifiers are shapes, too: torch takes each to many operations, which is up to half of
    a symbolic run."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if func is F.batch_norm and isinstance(args[0], FakeTensor):
            made = _normed(*args, **(kwargs or {}))
            if made is not None:
                return made
        if func is F.hardtanh and isinstance(args[0], FakeTensor) and args[0].is_floating_point():
            inplace = args[3] if len(args) > 3 else (kwargs or {}).get("inplace", False)
            return args[0] if inplace else torch.empty_like(args[0])
        if name == PACK and isinstance(args[0], FakeTensor):
            return _pack(*args)
        if name == UNPACK and isinstance(args[0], FakeTensor):
            return _pad(*args)
        return func(*args, **(kwargs or {}))


def _normed(
    given: Tensor,
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    *_: Any,
    **__: Any,
) -> Tensor | None:
    """Return what a norm of batches gives in eval mode; None where torch has more to look at.

    Raises:
        RuntimeError: another number of channels, in torch's words.
    """
    if training or given.dim() < 2 or mean is None or var is None:
        return None
    named = {"running_mean": mean, "running_var": var, "weight": weight, "bias": bias}
    for name, one in named.items():
        if one is not None and given.shape[1] != one.shape[0]:
            words = f"{name} should contain {given.shape[1]} elements not {one.shape[0]}"
            raise RuntimeError(words)
    return torch.empty_like(given)


def _pack(given: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """(N, T, ...) or (T, N, ...) -> data (sum of lengths, ...), batch sizes (T,)."""
    plain = [int(n) for n in lengths]
    sizes = [sum(n > t for n in plain) for t in range(max(plain))]
    data = given.new_empty(sum(plain), *given.shape[2:])
    return data, torch.tensor(sizes, dtype=torch.int64)


def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, total: int
) -> tuple[Tensor, Tensor]:
    sizes = [int(n) for n in batch_sizes]
    steps = max(total, len(sizes))
    lengths = [sum(n > i for n in sizes) for i in range(sizes[0])]
    shape = (sizes[0], steps) if batch_first else (steps, sizes[0])
    return data.new_empty(*shape, *data.shape[1:]), torch.tensor(lengths, dtype=torch.int64)


def stub(module: nn.Module) -> None:
    """Replace a forward of torch's that does not run on fake tensors by one that only computes
    shapes."""
    kind, forward = relative_of(module), None
    if kind is not None and type(module).forward is kind.base_of(module).forward:
        forward = kind.shapes_only(module)
    if forward is not None:
        module.__dict__["forward"] = forward


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leave the random state as it was, and keep torch from logging what we catch and report."""
    muted = [logger for name in FAKE_LOGGERS if not (logger := logging.getLogger(name)).disabled]
    with same_draws():
        try:
            for logger in muted:
                logger.disabled = True
            yield
        finally:
            for logger in muted:
                logger.disabled = False


def call(model: nn.Module, mode: FakeMode, args: Args, kwargs: Kwargs, *, training: bool) -> Any:
    """Call a copy of a model whose tensors were made by ``mode``."""
    model.train(training)
    args, kwargs = mode.inputs(args, kwargs)
    with (
        undisturbed(),
        quiet_forward(),
        torch.no_grad(),
        mode,
        enable_python_dispatcher(),
        _Packing(),
    ):
        return model(*args, **kwargs)
