"""Inputs of chosen layers, caught while a model runs; the run ends once all have been seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.errors import DataError
from bp_convert.graph.example import adapt
from bp_convert.graph.running import Args, Kwargs, in_mode, quiet_forward, same_draws
from bp_convert.graph.tree import map_tensors, tensors_in
from bp_convert.kinds import given_to

Batch = tuple[Args, Kwargs]
Batches = Sequence[Batch]


class Enough(Exception):  # noqa: N818 - a signal, not an error
    """Everything that was asked for has been seen."""


class Tap:
    """Catches what each call of the named layers is given: the first argument, or what the layer's
    kind wants to know.

    A layer may be called several times in a pass; it counts as seen with its last call, which
    ``calls`` tells, so that the rest of the pass can be left out.
    """

    def __init__(self, model: nn.Module, names: Iterable[str], calls: dict[str, int] | None = None):
        self.model = model
        self.calls = calls
        self.seen: dict[str, list[Any]] = {}
        self.versions: list[tuple[Tensor, int]] = []
        self.copies: dict[tuple[int, int], Tensor] | None = None  # by tensor and version
        modules = dict(model.named_modules(remove_duplicate=False))
        self.names = tuple(names)
        self.handles = [
            modules[name].register_forward_pre_hook(
                self._catch(name, given_to(modules[name])), with_kwargs=True
            )
            for name in self.names
        ]

    def _catch(self, name: str, given: Any) -> Any:
        def hook(_: nn.Module, args: Args, kwargs: Kwargs) -> None:
            caught = given(args, kwargs)
            self.versions += [(one, _version(one)) for one in tensors_in(caught, objects=True)]
            if self.copies is not None:
                caught = map_tensors(self._copied, caught)
            self.seen.setdefault(name, []).append(caught)
            if self.calls is not None and all(
                len(self.seen.get(one, ())) >= self.calls[one] for one in self.names
            ):
                raise Enough

        return hook

    def run(self, batch: Batch, number: int = 0) -> dict[str, list[Any]]:
        """Run the model on a batch in eval mode, as ``run_quietly`` does; return the inputs by
        layer. A model that writes on them afterwards is run again, and copies are returned."""
        self._run(batch, number)
        written = (was < 0 or _version(one) != was for one, was in self.versions)
        if self.copies is None and any(written):
            self.copies = {}
            self._run(batch, number)
        self.versions = []
        return self.seen

    def _run(self, batch: Batch, number: int) -> None:
        self.seen, self.versions = {}, []
        if self.copies is not None:
            self.copies = {}
        run_quietly(self.model, batch, number)

    def _copied(self, tensor: Tensor) -> Tensor:
        """Return a copy, the same for layers that get the same tensor; ``versions`` holds that, so
        that no other has its ``id``."""
        assert self.copies is not None
        key = (id(tensor), _version(tensor))
        found = self.copies.get(key)
        if found is None or (key[1] < 0 and not torch.equal(found, tensor)):
            found = self.copies[key] = tensor.clone()
        return found

    def __enter__(self) -> Tap:
        self.mode = in_mode(self.model, training=False)
        self.mode.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
        self.mode.__exit__(None, None, None)


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was written on; -1 where it does not count."""
    return -1 if tensor.is_inference() else tensor._version


def run_quietly(model: nn.Module, batch: Batch, number: int = 0, *, gradients: bool = False) -> Any:
    """Run a model on a batch; None where a tap ended the pass.

    Args:
        number: of the batch, from which random numbers start, so that two models draw the same.
        gradients: record what a backward pass needs.

    Raises:
        DataError: the model does not run on this data.
    """
    args, kwargs = adapt(model, *batch)
    try:
        with same_draws(number, model), quiet_forward(), torch.set_grad_enabled(gradients):
            return model(*args, **kwargs)
    except Enough:
        return None
    except Exception as problem:
        words = str(problem).strip().splitlines() or [type(problem).__name__]
        shapes = [tuple(x.shape) for x in tensors_in((args, kwargs), objects=True)]
        raise DataError(
            where=f"{type(model).__name__} on calibration data of shapes {shapes}",
            found=f"{type(problem).__name__}: {words[0][:200]}",
            allowed="data that the model runs on",
            fix="give examples as the model takes them: the same sizes, types and tokenizer",
        ) from problem


def token_mask(batch: Batch) -> Tensor | None:
    """Return which tokens of a batch count, (N, T) booleans, where the model is told so."""
    mask = batch[1].get("attention_mask")
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
