"""Optimisers and schedules by name, and which parameters get which rate and decay."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from bp_convert.errors import TrainingError
from bp_convert.kinds import is_twin
from bp_convert.values.training import Training

PLAIN = 1e-3  # the learning rate where none is given or chosen

# The multiple of the rate by the share of the steps that is done
SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * min(1.0, done))),
    "linear": lambda done: max(0.0, 1 - done),
    "step": lambda done: 0.1 ** ((done >= 0.5) + (done >= 0.75)),
}


def parameter_groups(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """Return the trainable parameters of a model; tied ones count once.

    ``factors`` are those of bilinear layers, ``weights`` dense ones, ``rest`` biases and norms.
    """
    factors = {
        id(parameter)
        for module in model.modules()
        if is_twin(module)
        for name, parameter in module.named_parameters(recurse=False)
        if not name.startswith("bias")
    }
    found: dict[str, list[nn.Parameter]] = {"factors": [], "weights": [], "rest": []}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) in factors:
            found["factors"].append(parameter)
        else:
            found["weights" if parameter.dim() > 1 else "rest"].append(parameter)
    return found


def make_optimizer(model: nn.Module, settings: Training) -> torch.optim.Optimizer:
    """Return the optimiser that the settings name, with a group each for factors, dense weights
    and the rest.

    Raises:
        TrainingError: it is unknown or does not take the options, or nothing is trainable.
    """
    parameters = parameter_groups(model)
    if not any(parameters.values()):
        raise TrainingError(
            where=type(model).__name__,
            found="no parameter that requires a gradient",
            allowed="at least one trainable parameter",
            fix="set requires_grad on what is to be trained",
        )
    decays = {"factors": settings.factor_decay, "weights": settings.weight_decay}
    kind = _optimizer_class(settings.optimizer)
    decaying = "weight_decay" in _accepted(kind)
    groups: list[dict[str, Any]] = []
    for name, ones in parameters.items():
        if not ones:
            continue
        rate = _rate_of(name, settings, PLAIN if settings.lr == "auto" else settings.lr)
        group: dict[str, Any] = {"params": ones, "lr": rate, "name": name}
        if decaying:
            group["weight_decay"] = decays.get(name, 0.0)
        elif decays.get(name):
            raise _refused(settings.optimizer, "a weight decay", "leave the decay out")
        groups.append(group)
    _check_options(settings.optimizer, kind, settings.optimizer_options)
    try:
        made: torch.optim.Optimizer = kind(groups, **_plain(settings.optimizer_options))
    except (TypeError, ValueError) as problem:
        raise _refused(
            settings.optimizer, f"{settings.optimizer_options}: {problem}", "correct the options"
        ) from None
    return made


def set_rate(optimizer: torch.optim.Optimizer, settings: Training, rate: float) -> None:
    """Give an optimiser another learning rate, from which a new schedule starts."""
    for group in optimizer.param_groups:
        group.pop("initial_lr", None)
        group["lr"] = _rate_of(group["name"], settings, rate)


def _rate_of(name: str, settings: Training, rate: float) -> float:
    """Return the learning rate of a group of parameters."""
    return settings.factor_lr or rate if name == "factors" else rate


def make_schedule(optimizer: torch.optim.Optimizer, settings: Training, steps: int) -> LRScheduler:
    """Return the schedule that the settings name, over ``steps`` steps.

    Raises:
        TrainingError: it is unknown or cannot be made.
    """
    warm = round(settings.warmup * steps)
    name = settings.schedule
    shape = SHAPES.get(name)
    if shape is not None:

        def rate(step: int) -> float:
            if step < warm:
                return (step + 1) / (warm + 1)
            return float(shape((step - warm) / max(1, steps - warm)))

        return LambdaLR(optimizer, rate)
    kind: Any = getattr(torch.optim.lr_scheduler, name, None) or _imported(name, "schedule")
    if not (isinstance(kind, type) and issubclass(kind, LRScheduler)):
        if not callable(kind):
            raise _unknown("schedule", name, _schedules())
        return LambdaLR(optimizer, lambda step: float(kind(step / max(1, steps))))
    if warm:
        raise _refused(name, "a warm-up", "leave warmup out: this scheduler has its own course")
    options = dict(settings.schedule_options)
    for key in ("total_steps", "T_max", "total_iters"):
        if key in _accepted(kind):
            options.setdefault(key, steps)
    try:
        made: LRScheduler = kind(optimizer, **options)
    except (TypeError, ValueError) as problem:
        raise _refused(name, str(problem), "give its arguments as schedule_options") from None
    return made


def _classes(home: Any, base: type) -> dict[str, Any]:
    """Return the kinds of a class that a module of torch's offers, by name."""
    return {
        key: value
        for key, value in vars(home).items()
        if isinstance(value, type) and issubclass(value, base) and value is not base
    }


def _optimizer_class(name: str) -> Any:
    known = _classes(torch.optim, torch.optim.Optimizer)
    known.pop("LBFGS")  # it wants a closure
    found = {key.lower(): value for key, value in known.items()}.get(name.lower())
    if found is None and ":" in name:
        found = _imported(name, "optimizer")
    if not callable(found):
        raise _unknown("optimizer", name, list(known))
    return found


def _imported(name: str, what: str) -> Any:
    module, _, attribute = name.partition(":")
    if not attribute:
        raise _unknown(what, name, _schedules())
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as problem:
        raise TrainingError(
            where=f"{what}={name}",
            found=f"it cannot be imported: {problem}",
            allowed="package.module:NAME of something installed",
            fix="check the name, or install the package",
        ) from None


def _schedules() -> list[str]:
    return [*SHAPES, *_classes(torch.optim.lr_scheduler, LRScheduler)]


def _accepted(kind: Any) -> list[str]:
    return list(inspect.signature(kind).parameters)


def _check_options(name: str, kind: Any, options: dict[str, Any]) -> None:
    parameters = inspect.signature(kind).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return
    accepted = [one for one in parameters if one not in ("params", "lr", "weight_decay")]
    for key in options:
        if key not in accepted:
            raise TrainingError(
                where=f"optimizer_options of {name}",
                found=f"the option {key}",
                allowed=", ".join(accepted),
                fix=_nearest(
                    key, accepted, 1, "leave it out; lr and the decays are settings of their own"
                ),
            )


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Lists, as files write them, become the tuples that optimisers take."""
    return {key: tuple(v) if isinstance(v, list) else v for key, v in options.items()}


def _unknown(what: str, name: str, known: list[str]) -> TrainingError:
    return TrainingError(
        where=f"{what}={name}",
        found="no such name",
        allowed=f"{', '.join(known)}, or package.module:NAME",
        fix=_nearest(name, known, 2, "name one of these"),
    )


def _nearest(name: str, known: list[str], count: int, otherwise: str) -> str:
    near = difflib.get_close_matches(name, known, n=count)
    return f"did you mean {' or '.join(near)}?" if near else otherwise


def _refused(name: str, found: str, fix: str) -> TrainingError:
    return TrainingError(where=name, found=found, allowed="what its constructor takes", fix=fix)
