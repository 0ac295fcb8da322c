"""Modules that pose as the tensor that they stand for: a stack of matrices (E, K, D).

A class that holds its experts as one parameter indexes it, and multiplies by what it gets. The
module that takes the parameter's place answers with a ``Picked``, which remembers what was asked
for; torch's functions hand it over (``__torch_function__``), and a product becomes a call of the
module. Whatever else is done with it is done to the tensor, which is built for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.torch_private import tree_map_only

At = int | Tensor | None  # one matrix, several by a tensor of one axis, or all


class _Acting:
    """What looks like a tensor of matrices to torch's functions and to operators."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        product = _PRODUCTS.get(getattr(func, "__name__", ""))
        found = None if product is None else product(*args, **kwargs)
        if found is not None:
            return found
        args, kwargs = tree_map_only(_Acting, lambda one: one.built(), (args, kwargs))
        return func(*args, **kwargs)

    def built(self) -> Tensor:
        """Return the tensor itself."""
        raise NotImplementedError

    def __matmul__(self, other: Any) -> Any:
        acting: Any = self
        return torch.matmul(acting, other)

    def __mul__(self, other: Any) -> Any:
        return self.built() * other

    def __rmul__(self, other: Any) -> Any:
        return other * self.built()

    def __add__(self, other: Any) -> Any:
        return self.built() + other

    def __radd__(self, other: Any) -> Any:
        return other + self.built()

    def __sub__(self, other: Any) -> Any:
        return self.built() - other

    def __neg__(self) -> Tensor:
        return -self.built()

    def __truediv__(self, other: Any) -> Any:
        return self.built() / other


class Picked(_Acting):
    """A matrix of a stack, several, or all of them, perhaps turned round; not built until
    something other than a product asks for its numbers.

    Args:
        stack: the module.
        at: which of its matrices.
        turned: they are turned round, (D, K) each.
    """

    def __init__(self, stack: Posing, at: At, *, turned: bool = False) -> None:
        self.stack, self.at, self.turned = stack, at, turned

    def built(self) -> Tensor:
        dense = self.stack.matrices(self.at)
        return dense.transpose(-2, -1) if self.turned else dense

    @property
    def mT(self) -> Picked:  # noqa: N802 - torch's name
        return Picked(self.stack, self.at, turned=not self.turned)

    @property
    def T(self) -> Any:  # noqa: N802 - torch's name
        return self.mT if self.ndim == 2 else self.built().T

    def t(self) -> Any:
        return self.T

    def transpose(self, one: int, two: int) -> Any:
        axes = {one % self.ndim, two % self.ndim}
        last = {self.ndim - 2, self.ndim - 1}
        return self.mT if axes == last else self.built().transpose(one, two)

    def contiguous(self) -> Picked:
        return self

    def data_ptr(self) -> int:
        """Return 0, a place that is aligned to anything: nothing lies in memory yet."""
        return 0

    @property
    def shape(self) -> torch.Size:
        _, rows, columns = self.stack.shape
        sides = (columns, rows) if self.turned else (rows, columns)
        return torch.Size((*self._before(), *sides))

    def _before(self) -> tuple[int, ...]:
        if self.at is None:
            return (self.stack.shape[0],)
        return tuple(self.at.shape) if isinstance(self.at, Tensor) else ()

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    @property
    def ndim(self) -> int:
        return 2 + len(self._before())

    def dim(self) -> int:
        return self.ndim

    @property
    def dtype(self) -> torch.dtype:
        return self.stack.dtype

    @property
    def device(self) -> torch.device:
        return self.stack.device

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        if self.at is None and _is_at(index):
            return Picked(self.stack, index, turned=self.turned)
        return self.built()[index]

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.built(), name)


class Posing(_Acting, nn.Module):
    """A module that stands where a parameter (E, K, D) stood.

    Args of a call:
        x: what one matrix multiplies, (..., D); what each of several does, (S, n, D); or the rows
            of all of them, (N, D), where ``offs`` tells them apart.
        at: which matrices.
        back: they are multiplied from the left, as in ``x @ stack[at]``: x is (..., K).
        offs: (E) where the rows of each matrix end.
    """

    @property
    def first(self) -> nn.Parameter:
        """A parameter whose device and dtype are those of the tensor."""
        raise NotImplementedError

    @property
    def shape(self) -> torch.Size:
        raise NotImplementedError

    def matrices(self, at: At = None) -> Tensor:
        """Build some of the matrices, (..., K, D)."""
        raise NotImplementedError

    def apply_to(self, x: Tensor, at: At, *, back: bool) -> Tensor:
        """Multiply by one matrix, or by each of several."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, at: At = None, *, back: bool = False, offs: Tensor | None = None
    ) -> Tensor:
        if offs is None:
            return self.apply_to(x, at, back=back)
        if x.is_meta:
            return self.apply_to(x, 0, back=back)  # as many rows, whichever matrix each is for
        parts, start = [], 0
        ends = offs.tolist()
        for number, end in enumerate(ends):
            if end > start:
                parts.append(self.apply_to(x[start:end], number, back=back))
            start = end
        if start < len(x):  # rows of no matrix
            parts.append(x.new_zeros(len(x) - start, self.shape[2 if back else 1]))
        return torch.cat(parts) if parts else self.apply_to(x, 0, back=back)

    def built(self) -> Tensor:
        return self.matrices()

    def all(self) -> Picked:
        """Return all of the matrices, not built yet."""
        return Picked(self, None)

    # What code asks of the tensor; modules have names of their own for some of it.

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    @property
    def device(self) -> torch.device:
        return self.first.device

    @property
    def ndim(self) -> int:
        return 3

    def dim(self) -> int:
        return 3

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self.all()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.all())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or not hasattr(Tensor, name):
                raise
        return getattr(self.all(), name)


def _is_at(index: Any) -> bool:
    """Return whether an index picks whole matrices: a number, or a tensor of some."""
    if isinstance(index, Tensor):
        return index.dim() <= 1 and not index.is_floating_point() and index.dtype != torch.bool
    return isinstance(index, int) and not isinstance(index, bool)


# Products, by the names of torch's functions; each returns None for what it cannot tell. A matrix
# W (K, D) is applied by x @ W^T, or back by x @ W.


def _picked(one: Any) -> Picked | None:
    if isinstance(one, Posing):
        return one.all()
    return one if isinstance(one, Picked) else None


def _linear(x: Any, weight: Any, bias: Any = None, **more: Any) -> Any:
    part = _picked(weight)
    if part is None or part.ndim != 2 or not isinstance(x, Tensor) or more:
        return None
    y = part.stack(x, part.at, back=part.turned)
    return y if bias is None else y + bias


def _matmul(x: Any, y: Any, **more: Any) -> Any:
    right, left = _picked(y), _picked(x)
    if more or (right is not None and left is not None):
        return None
    if right is not None:
        fits = right.ndim == 2 or (isinstance(x, Tensor) and x.dim() == 3)
        if not fits or not isinstance(x, Tensor):
            return None
        return right.stack(x, right.at, back=not right.turned)
    if left is None or not isinstance(y, Tensor) or y.dim() != left.ndim:
        return None
    # W y = (y^T W^T)^T
    return left.stack(y.transpose(-2, -1), left.at, back=left.turned).transpose(-2, -1)


def _grouped(x: Any, y: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    part = _picked(y)
    if part is None or part.at is not None or not isinstance(x, Tensor) or x.dim() != 2:
        return None
    if offs is None or torch.compiler.is_compiling():
        return None
    found = part.stack(x, None, back=not part.turned, offs=offs)
    found = found if bias is None else found + bias
    return found if out_dtype is None else found.to(out_dtype)


_PRODUCTS: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    **dict.fromkeys(("matmul", "mm", "bmm"), _matmul),
    **dict.fromkeys(("grouped_mm", "_grouped_mm", "grouped_mm_fallback"), _grouped),
}
