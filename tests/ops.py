"""What a piece of code asks of torch, operation by operation."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}
VIEWS = {"view", "_unsafe_view", "transpose", "permute", "t", "expand", "unsqueeze", "squeeze"}


class Ops(TorchDispatchMode):
    """Record the name of each operation and the number of entries of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out: Any = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, tuple) else out
        self.seen.append((func.overloadpacket.__name__, first.numel()))
        return out
