"""Running a model so that the run leaves no trace and can be repeated to the bit."""

from __future__ import annotations

import functools
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from bp_convert.errors import TraceError
from bp_convert.torch_private import FakeTensor

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
M = TypeVar("M", bound=nn.Module)
_DEPTH = 3  # how far into what a module caches tensors without data are looked for


@contextmanager
def draws_kept(*models: nn.Module) -> Iterator[None]:
    """Put every source of random numbers back as it was, so that who runs next draws the same.

    Args:
        models: whose devices draw numbers of their own.
    """
    there = models if torch.cuda.is_available() else ()
    devices = {p.device.index or 0 for one in there for p in one.parameters() if p.is_cuda}
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextmanager
def same_draws(seed: int = 0, *models: nn.Module) -> Iterator[None]:
    """Start every source of random numbers from ``seed``, and put each back as it was."""
    with draws_kept(*models):
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Switch a model to train or eval mode, and put every module's flag back."""
    flags = {module: module.training for module in model.modules()}
    model.train(training)  # a class may override it, and need not return itself
    try:
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag


def evaluating(model: M) -> M:
    """Switch a model to eval mode and return it; its own ``eval`` need not."""
    model.eval()
    return model


@contextmanager
def fast_path(enabled: bool) -> Iterator[None]:
    """Switch attention's fused eval path, which goes around the layers that it holds."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def quiet_forward() -> Any:
    """Switch the fused path off, so that every layer is called."""
    return fast_path(False)


@contextmanager
def inference(model: nn.Module, seed: int = 0) -> Iterator[None]:
    """Let a model run so that it can be compared: in eval mode, without gradients, every layer
    called, drawing from ``seed``."""
    with same_draws(seed, model), in_mode(model, training=False), torch.no_grad(), quiet_forward():
        yield


def run(model: nn.Module, args: Args, kwargs: Kwargs) -> Any:
    """Call the model; turn any failure into a TraceError that quotes it.

    Raises:
        TraceError: the forward raised.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user meets them when the model is used
            return model(*args, **kwargs)
    except Exception as problem:
        text = str(problem).strip().splitlines()
        given = ", ".join(
            [describe(one) for one in args] + [f"{k}={describe(v)}" for k, v in kwargs.items()]
        )
        raise TraceError(
            where=f"{type(model).__name__}.forward({given})",
            found=f"{type(problem).__name__}: {text[0][:300] if text else 'no message'}",
            allowed="an input that the model accepts",
            fix="describe a real input with --input, such as 3x224x224 or tokens=int64:1x16 "
            "(repeat it for several inputs), or give examples with --calibrate",
        ) from problem


def describe(value: Any) -> str:
    """Name a value by dtype and shape."""
    if isinstance(value, Tensor):
        shape = "x".join(str(n) for n in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')}:{shape}"
    return type(value).__name__


@contextmanager
def nothing_cached(model: nn.Module) -> Iterator[None]:
    """Take tensors without data out of what outlives a run beside the model itself.

    A forward may cache what it makes on its class or in its Python module; what a run on fake or
    meta tensors leaves there would meet the user's own model later.
    """
    homes = _homes(model)
    before = [dict(vars(home)) for home in homes]
    inside = [
        {key: one.copy() for key, one in box.items() if type(one) in (dict, list, set)}
        for box in before
    ]
    caches = [
        (one, one.cache_info().currsize)
        for box in before
        for one in box.values()
        if isinstance(one, functools._lru_cache_wrapper)
    ]
    try:
        yield
    finally:
        for home, old, held in zip(homes, before, inside, strict=True):
            _restore(home, old, held)
        for cache, size in caches:
            if cache.cache_info().currsize != size:
                cache.cache_clear()


def _homes(model: nn.Module) -> list[Any]:
    """Return the model's own classes and the Python modules that they stand in."""
    found: dict[int, Any] = {}
    for module in model.modules():
        for base in type(module).__mro__:
            if not base.__module__.startswith(("torch.", "builtins", "bp_convert.")):
                found[id(base)] = base
                home = sys.modules.get(base.__module__)
                if home is not None:
                    found[id(home)] = home
    return list(found.values())


def _restore(home: Any, old: dict[str, Any], held: dict[str, Any]) -> None:
    box: dict[str, Any] = dict(vars(home))
    for key, now in box.items():
        if isinstance(now, ModuleType) or not _without_data(now):
            continue
        if key in held and old[key] is now:
            now.clear()
            if isinstance(now, list):
                now.extend(held[key])
            else:
                now.update(held[key])
        elif key in old:
            setattr(home, key, old[key])
        else:
            delattr(home, key)


def _without_data(value: Any, depth: int = _DEPTH) -> bool:
    if isinstance(value, Tensor):
        return isinstance(value, FakeTensor) or value.is_meta
    if depth and type(value) in (dict, list, tuple, set):
        items = value.values() if isinstance(value, dict) else value
        return any(_without_data(one, depth - 1) for one in list(items)[:1000])
    return False
