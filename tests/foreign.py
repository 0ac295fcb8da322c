"""A device that plays CUDA on the CPU: what torch refuses between two devices is refused here.

Tensors of the class ``Foreign`` say that they are on ``cuda:0``. While ``Abroad`` is on, an
operation on one of them and an ordinary tensor raises, as torch does, and so does handing one to
NumPy; moving, ``copy_``, tensors of no dimension and indices on the CPU are allowed, as in torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

HERE, THERE = torch.device("cpu"), torch.device("cuda:0")
MIXED_ALLOWED = {"copy_", "__deepcopy__"}


class Foreign(Tensor):
    """A tensor on the other device."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def _there(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class Abroad(TorchFunctionMode):
    """Keeps both devices apart."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        where = getattr(func, "__self__", None)
        first = args[0] if args else None
        if name == "__get__" and isinstance(first, Foreign):
            field = getattr(where, "__name__", "")
            if field in ("device", "is_cuda", "is_cpu"):
                return {"device": THERE, "is_cuda": True, "is_cpu": False}[field]
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        foreign = [t for t in tensors if isinstance(t, Foreign)]
        if isinstance(first, Foreign) and name in ("numpy", "__array__"):
            raise TypeError(f"can't convert {THERE} device type tensor to numpy")
        if name in ("to", "cpu", "cuda"):
            return self._moved(name, args, kwargs)
        if name == "_has_compatible_shallow_copy_type":
            return isinstance(args[0], Foreign) == isinstance(args[1], Foreign)
        if name == "__deepcopy__" and isinstance(first, Foreign):
            return _copied(first, args[1])
        ordinary = [t for t in tensors if not isinstance(t, Foreign) and t.dim()]
        if name in ("__getitem__", "__setitem__") and isinstance(first, Foreign):
            indices = pytree.tree_leaves(args[1])
            ordinary = [t for t in ordinary if not any(t is index for index in indices)]
        if foreign and ordinary and name not in MIXED_ALLOWED:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{THERE} and {HERE}! ({name})"
            )
        device = kwargs.pop("device", None)
        if device is not None:
            kwargs["device"] = "cpu" if _there(device) else device
        away = _there(device) if device is not None else bool(foreign)
        if name == "copy_":
            away = isinstance(first, Foreign)
        return _placed(func(*args, **kwargs), away=away)

    @staticmethod
    def _moved(name: str, args: Any, kwargs: Any) -> Any:
        tensor, rest = args[0], list(args[1:])
        away: bool | None = {"cpu": False, "cuda": True}.get(name)
        for at, one in enumerate(rest):
            if isinstance(one, (str, torch.device)):
                away, rest[at] = _there(one), HERE
            elif isinstance(one, Tensor):
                away, rest[at] = isinstance(one, Foreign), one.dtype
        if kwargs.get("device") is not None:
            away, kwargs["device"] = _there(kwargs["device"]), HERE
        was = isinstance(tensor, Foreign)
        away = was if away is None else away
        moved = Tensor.to(tensor, *rest, **kwargs) if name == "to" else tensor
        if away == was:
            return _placed(moved, away=away)
        moved = moved.clone() if moved is tensor else moved
        return moved.as_subclass(Foreign if away else Tensor)


def _copied(tensor: Foreign, memo: dict[int, Any]) -> Any:
    if id(tensor) not in memo:
        new = tensor.detach().clone().as_subclass(Foreign).requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            new._is_param = True  # type: ignore[attr-defined]
        memo[id(tensor)] = new
    return memo[id(tensor)]


def _placed(found: Any, *, away: bool) -> Any:
    def place(tensor: Tensor) -> Tensor:
        if away and not isinstance(tensor, Foreign):
            return tensor.as_subclass(Foreign)
        if not away and isinstance(tensor, Foreign):
            return tensor.as_subclass(Tensor)
        return tensor

    return pytree.tree_map_only(Tensor, place, found)


def abroad_(model: nn.Module) -> nn.Module:
    """Move a model there, in place."""
    with Abroad():
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    new = nn.Parameter(parameter.detach().to(THERE), parameter.requires_grad)
                    module._parameters[name] = new
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(THERE)
            if isinstance(module, nn.RNNBase):
                module._init_flat_weights()
    return model
