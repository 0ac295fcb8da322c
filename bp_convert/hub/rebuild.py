"""The model of a converted folder: transformers makes its class, its layers are exchanged before
any weight is loaded, and transformers' own loading does the rest."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import nn

from bp_convert.errors import BpConvertError, CheckpointError
from bp_convert.graph.walk import walk
from bp_convert.hub.layout import CODE, KEY, class_named, config_of, plan_of_folder, told_by
from bp_convert.hub.marked import mark, quiet, text_of
from bp_convert.surgery import apply_plan, check
from bp_convert.values.plan import Plan


def rebuilt(name: str) -> type:
    """Return what stands for a class of transformers and makes its models with the layers that
    their config tells. What it makes is of the class itself.

    Raises:
        AttributeError: transformers has no such model.
    """
    import transformers

    base = getattr(transformers, name, None)
    if not (isinstance(base, type) and issubclass(base, transformers.PreTrainedModel)):
        raise AttributeError(f"transformers {transformers.__version__} has no model {name!r}")
    known: Any = base  # no stub says that a class can be hashed
    stand: type = _made(known)
    return stand


@functools.cache
def _made(base: Any) -> type:
    names = {"__module__": base.__module__, "__doc__": base.__doc__, "converted_base": base}
    return _Rebuilt(base.__name__, (base,), names)


class _Rebuilt(type):
    """Calls its base, and carries out on what comes the plan that stands in the config."""

    def __call__(cls, config: Any, *arguments: Any, **options: Any) -> nn.Module:
        plain, plan = parted(config)
        base: Any = cls.converted_base  # type: ignore[attr-defined]
        return with_layers(base(plain, *arguments, **options), plan)


def parted(config: Any) -> tuple[Any, Plan]:
    """Take from a copy of a config what was added to it; return both.

    Raises:
        CheckpointError: nothing was added, or nothing that this version reads.
    """
    told = getattr(config, KEY, None)
    where = str(getattr(config, "name_or_path", "") or type(config).__name__)
    if not isinstance(told, dict) or "plan" not in told:
        raise _unreadable(where, "a config without the layers of a converted model")
    try:
        plan = Plan.model_validate(told["plan"])
    except ValidationError as problem:
        first = problem.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise _unreadable(where, f"at {KEY}.plan.{place}: {first['msg']}") from None
    plain = copy.deepcopy(config)
    delattr(plain, KEY)
    entries = getattr(plain, "auto_map", None) or {}
    kept = {key: one for key, one in entries.items() if CODE.removesuffix(".py") not in str(one)}
    if kept:
        plain.auto_map = kept
    elif hasattr(plain, "auto_map"):
        del plain.auto_map
    return plain, _whole(plan, where)


def _whole(plan: Plan, where: str) -> Plan:
    """Return the whole plan from the file in its folder, where it is of the same conversion."""
    full = plan_of_folder(Path(where))
    return full if full is not None and told_by(full) == told_by(plan) else plan


def with_layers(model: nn.Module, plan: Plan) -> nn.Module:
    """Return a copy of a fresh model with the layers of a plan, which start at random.

    Args:
        plan: of this class, or of another with the same body, such as one with another head.

    Raises:
        CheckpointError: they do not fit together.
        PlanError: a layer is not what the plan says.
    """
    plan = _for_class(plan, model)
    check(model, plan, exact=False)
    # Every start is random: structure without fitting.
    layers = tuple(one.model_copy(update={"init": "random"}) for one in plan.layers)
    made = apply_plan(model, plan.model_copy(update={"layers": layers}), checked=True).model
    mark(made, text_of(plan))
    return made


def _for_class(plan: Plan, model: Any) -> Plan:
    """Name a plan's layers as another class of the same config names them: with the name of the
    body before them, or without. Layers that it lacks, of another head, are left out."""
    names = {name for site in walk(model) for name in site.names}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    ways: list[Callable[[str], str]] = [
        lambda name: name,
        lambda name: name.removeprefix(prefix),
        lambda name: prefix + name,
    ]
    changed = [one.name for one in plan.layers if one.action != "kept"]
    found = [sum(way(name) in names for name in changed) for way in ways]
    way, most = ways[found.index(max(found))], max(found)
    same_class = plan.model.rpartition(".")[2] == type(model).__name__
    if most < len(changed) and (same_class or not most or plan.resizes):
        lacking = [name for name in changed if way(name) not in names]
        raise CheckpointError(
            where=type(model).__name__,
            found=f"{len(lacking)} of {len(changed)} converted layers are not in it, such as "
            f"{lacking[0]}",
            allowed="the class that was converted, or another with the same body",
            fix=f"load it as the {plan.model.rpartition('.')[2]} that it is",
        )
    if same_class:
        return plan
    return plan.model_copy(
        update={
            "layers": tuple(
                one.model_copy(
                    update={
                        "name": way(one.name),
                        "aliases": (),
                        "shares": {key: way(whose) for key, whose in one.shares.items()},
                    }
                )
                for one in plan.layers
                if way(one.name) in names
            ),
            "resizes": tuple(
                one.model_copy(update={"name": way(one.name)}) for one in plan.resizes
            ),
            "attrs": tuple(
                one.model_copy(update={"module": way(one.module)}) for one in plan.attrs
            ),
        }
    )


def from_pretrained(folder: str | Path, **options: Any) -> nn.Module:
    """Load a converted model from the folder of transformers that it was saved to; run nothing
    that stands there, and download nothing.

    Args:
        folder: that ``save_pretrained``, ``bp_convert.save`` or the command line wrote.
        options: of transformers' ``from_pretrained``, such as ``dtype``, ``device_map`` or
            ``attn_implementation``; ``local_files_only=False`` lets a name on the Hub stand for a
            folder.

    Returns:
        The model, of its own class, in eval mode.

    Raises:
        CheckpointError: the folder holds no converted model, or not all of it.
    """
    options.setdefault("local_files_only", True)
    where = str(folder)
    if Path(folder).is_dir():
        config = config_of(Path(folder))
        name = class_named(config)
        if not isinstance(config.get(KEY), dict) or name is None:
            raise _unreadable(where, "a folder that holds no converted model")
    transformers = needed("transformers", where)
    if not Path(folder).is_dir():
        known = ("local_files_only", "revision", "token", "cache_dir", "subfolder")
        given = {key: one for key, one in options.items() if key in known}
        with _loading(where):
            name = class_named(transformers.AutoConfig.from_pretrained(where, **given).to_dict())
    try:
        made: Any = rebuilt(str(name))
    except AttributeError as problem:
        raise _unreadable(where, str(problem), "install a transformers that has it") from None
    with _loading(where):
        model, said = made.from_pretrained(where, output_loading_info=True, **options)
    lost = [*said["missing_keys"], *(str(one) for one in said["mismatched_keys"])]
    if lost:
        raise _unreadable(
            where, f"no weights for {len(lost)} tensors, such as {sorted(lost)[0]}", _AGAIN
        )
    loaded: nn.Module = model
    return loaded


@contextmanager
def _loading(where: str) -> Iterator[None]:
    """Let what goes wrong in transformers be an error that names the folder."""
    try:
        with quiet():
            yield
    except BpConvertError:
        raise
    except Exception as problem:
        said = (str(problem).strip().splitlines() or ["no more words"])[0][:200]
        raise _unreadable(
            where, f"transformers cannot load it: {type(problem).__name__}: {said}", _AGAIN
        ) from problem


_AGAIN = "copy the folder again, or convert the model again"


def needed(package: str, where: str) -> Any:
    """Import a package that the user has to have.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        return import_module(package)
    except ImportError:
        raise _unreadable(
            where, f"{package} is not installed", f"pip install 'bp-convert[{package}]'"
        ) from None


def _unreadable(where: str, found: str, fix: str = "") -> CheckpointError:
    return CheckpointError(
        where=where,
        found=found,
        allowed="a folder that a converted model was saved to",
        fix=fix or "convert it first: bp-convert FOLDER -o OUT/",
    )
