"""Batches of examples in memory, and how a model takes them."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bp_convert.graph.observe import Args, Kwargs

Batch = tuple[Args, Kwargs]
# What a tokenizer adds of its own accord; a forward that has no such argument goes without.
OPTIONAL = ("attention_mask", "token_type_ids")


@dataclass(frozen=True)
class Examples:
    """Examples in batches, on the CPU.

    Attributes:
        batches: (args, kwargs) of forward; each tensor has the examples on its first axis.
        labels: (count, ...), in the order of the batches, (count,) integers where the examples
            have classes; None where there are none.
        count: number of examples.
        source: where they come from, in words.
        rows: their numbers among those that calibration and training take of the source: empty
            where they are none of these, None where the source has no numbers.
        digest: the first 16 hex digits of the SHA-256 of all tensors. The same examples in
            batches of another size have another digest.
    """

    batches: tuple[Batch, ...]
    labels: Tensor | None
    count: int
    source: str
    digest: str
    rows: tuple[int, ...] | None = None

    @property
    def words(self) -> str:
        """What they are, for plans and reports: where from, and the hash of their contents."""
        return f"{self.source} (sha256 {self.digest})"

    def split_labels(self) -> list[Tensor | None]:
        """Return the labels of each batch."""
        if self.labels is None:
            return [None] * len(self.batches)
        return list(torch.split(self.labels, [rows_in(*one) for one in self.batches]))


def rows_in(args: Args, kwargs: Kwargs) -> int:
    """Return the number of examples in a batch: the length of its first tensor."""
    first = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    return first.shape[0]


def digest_of(batches: Sequence[Batch], labels: Tensor | None) -> str:
    """Return 16 hex digits that name the contents of the tensors."""
    found = hashlib.sha256()
    for args, kwargs in batches:
        named = [*enumerate(args), *sorted(kwargs.items())]
        for key, tensor in named:
            _feed(found, str(key), tensor)
    if labels is not None:
        _feed(found, "labels", labels)
    return found.hexdigest()[:16]


def _feed(found: Any, key: str, tensor: Tensor) -> None:
    found.update(f"{key}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
    found.update(tensor.contiguous().flatten().view(torch.uint8).numpy())


def adapt(model: nn.Module, args: Args, kwargs: Kwargs) -> Batch:
    """Copy a batch into the form that a model takes.

    Tensors move to the device of the model's first parameter, and float32 ones take its dtype, so
    that a half-precision model gets what it accepts. ``attention_mask`` and ``token_type_ids``
    are left out where forward has no such argument. Always a copy: a forward that works in place
    leaves the examples as they are.
    """
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    device = torch.device("cpu") if first is None else first.device
    own = torch.float32 if first is None else first.dtype

    def moved(tensor: Tensor) -> Tensor:
        dtype = own if tensor.dtype == torch.float32 else tensor.dtype
        return tensor.to(device, dtype, copy=True)

    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    kept = {
        key: value
        for key, value in kwargs.items()
        if takes_any or key in parameters or key not in OPTIONAL
    }
    there: Batch = pytree.tree_map_only(Tensor, moved, (args, kept))
    return there
