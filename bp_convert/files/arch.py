"""``--arch``: how to make the model that a file's weights belong to."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

from torch import nn

from bp_convert.errors import BpConvertError, CheckpointError
from bp_convert.hub.layout import CONFIG, class_named, config_of
from bp_convert.models import MODELS, build
from bp_convert.pickles.user_code import covers, run_file, run_module
from bp_convert.values.architecture import Architecture

ARCH_FORMS = (
    "torchvision:resnet18, timm:NAME, transformers:FOLDER, bp:NAME, FILE.py:FACTORY or "
    "PACKAGE.MODULE:FACTORY; options follow a question mark, as in "
    "torchvision:resnet18?num_classes=10"
)
Factory = Callable[..., Any]


def arch_factory(
    arch: str, *, trust: Sequence[str] = (), typed: bool = False
) -> Callable[[], nn.Module]:
    """Return what makes a freshly initialised model of an architecture; download nothing.

    Args:
        arch: one of the forms in ``ARCH_FORMS``.
        trust: packages and Python files that may be run.
        typed: the user wrote ``arch``, which is consent to run the Python file that it names. An
            ``arch`` that stands in a file is not.

    Raises:
        CheckpointError: the form, the name or an option is unknown, or the code is not trusted.
            The factory itself raises it too, where the model cannot be made.
    """
    source, name, query = Architecture.parse(arch)
    options = _options(arch, query)
    make: Callable[[], object]
    if source in _LIBRARIES:
        make = _LIBRARIES[source](arch, name, options)
    elif source and name:
        make = partial(_user_factory(arch, source, name, trust, typed), **options)
    else:
        raise _bad(arch, "no known form", f"use one of these forms: {ARCH_FORMS}")

    def factory() -> nn.Module:
        try:
            model = make()
        except BpConvertError:
            raise
        except Exception as problem:
            raise _bad(
                arch,
                f"making the model fails with {type(problem).__name__}: {problem}",
                "correct the options, or give a FILE.py:FACTORY that takes no arguments",
            ) from problem
        if not isinstance(model, nn.Module):
            raise _bad(
                arch,
                f"it makes a {type(model).__name__}",
                "name a function that returns an nn.Module, or an nn.Module class",
            )
        return model

    return factory


def arch_of_folder(folder: Path) -> str | None:
    """Return the architecture of a folder of transformers, of the class that its weights are of,
    or of timm; None of any other."""
    if not (folder / CONFIG).is_file():
        return None
    config = config_of(folder)
    if isinstance(config.get("architecture"), str) and "model_type" not in config:
        return _of_timm(config)
    named = class_named(config)
    return f"transformers:{folder.resolve()}" + (f"?class={named}" if named else "")


def _of_timm(config: dict[str, Any]) -> str:
    """Return the architecture that timm's config.json tells, with what it was made with."""
    asked: dict[str, Any] = {
        key: config[key] for key in ("num_classes", "global_pool") if key in config
    }
    given = config.get("model_args")
    asked.update(given if isinstance(given, dict) else {})
    words = {key: one if isinstance(one, str) else repr(one) for key, one in asked.items()}
    return f"timm:{config['architecture']}" + (f"?{urlencode(words)}" if words else "")


def absolute(arch: str) -> str:
    """Return an architecture with the whole path of its folder or file, to be read anywhere."""
    asked = Architecture.parse(arch)
    if asked.place is None:
        return arch
    whole = str(asked.place.resolve())
    source, name = (whole, asked.name) if asked.script else (asked.source, whole)
    return f"{source}:{name}?{asked.options}" if asked.options else f"{source}:{name}"


def _torchvision(arch: str, name: str, options: dict[str, Any]) -> Factory:
    import torchvision  # takes seconds

    known = torchvision.models.list_models()
    if name not in known:
        raise _unknown(arch, name, known)
    accepted = inspect.signature(torchvision.models.get_model_builder(name)).parameters
    quiet: dict[str, Any] = {"weights": None}
    if "weights_backbone" in accepted:
        quiet["weights_backbone"] = None  # else the backbone's weights are downloaded
    if name in {"googlenet", "inception_v3"}:
        quiet["init_weights"] = True  # the default, which torchvision wants to hear said
    return partial(torchvision.models.get_model, name, **{**quiet, **options})


def _timm(arch: str, name: str, options: dict[str, Any]) -> Factory:
    timm = _optional(arch, "timm")
    if not timm.is_model(name):
        raise _unknown(arch, name, timm.list_models())
    return partial(timm.create_model, name, pretrained=False, **options)


def _transformers(arch: str, folder: str, options: dict[str, Any]) -> Factory:
    transformers = _optional(arch, "transformers")
    if not Path(folder, "config.json").is_file():
        raise _bad(
            arch,
            f"no config.json in the folder {folder or '(none)'}",
            "give the local folder of a transformers model; nothing is downloaded",
        )
    wanted = str(options.pop("class", "AutoModel"))
    head: Any = getattr(transformers, wanted, None)
    auto = wanted.startswith("Auto") and hasattr(head, "from_config")
    is_model = isinstance(head, type) and issubclass(head, transformers.PreTrainedModel)
    if not auto and not is_model:
        near = [one for one in dir(transformers) if one.startswith("AutoModel")]
        raise _unknown(arch, wanted, near)

    def make() -> Any:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, **options
        )
        return head.from_config(config, trust_remote_code=False) if auto else head(config)

    return make


def _reference(arch: str, name: str, options: dict[str, Any]) -> Factory:
    if name not in MODELS:
        raise _unknown(arch, name, list(MODELS))
    return partial(build, name, **options)


_LIBRARIES: dict[str, Callable[[str, str, dict[str, Any]], Factory]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "transformers": _transformers,
    "bp": _reference,
}


def _user_factory(arch: str, target: str, name: str, trust: Sequence[str], typed: bool) -> Factory:
    is_file = target.endswith(".py")
    if is_file:
        trusted = typed or str(Path(target).resolve()) in {str(Path(t).resolve()) for t in trust}
    else:
        trusted = covers(trust, f"{target}.{name}")
    if not trusted:
        top = target if is_file else target.partition(".")[0]
        raise _bad(
            arch,
            f"{target} would be run to make the model",
            f"if you trust its code: --trust {top}, in Python trust=[{top!r}]",
        )
    asked_by = f"--arch {arch}"
    if is_file:
        module = run_file(Path(target), asked_by=asked_by)
    else:
        module = run_module(target, asked_by=asked_by)
    found = getattr(module, name, None)
    if not callable(found):
        made = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        ]
        raise _unknown(arch, name, made)
    factory: Factory = found
    return factory


def _options(arch: str, query: str) -> dict[str, Any]:
    if not query:
        return {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True)
    except ValueError:
        raise _bad(
            arch, f"options {query!r}", "write them as name=value&name=value after the ?"
        ) from None
    for key, _ in pairs:
        if key.startswith(("pretrained", "weights", "checkpoint", "cache", "trust_remote")):
            raise _bad(
                arch, f"the option {key}", "leave it out: the weights come from the model file"
            )
    return {key: _value(value) for key, value in pairs}


def _value(text: str) -> object:
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    try:
        value: object = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value


def _optional(arch: str, package: str) -> Any:
    try:
        return run_module(package, asked_by=f"--arch {arch}")
    except CheckpointError:
        raise _bad(
            arch, f"{package} is not installed", f"pip install 'bp-convert[{package}]'"
        ) from None


def _unknown(arch: str, name: str, known: Sequence[str]) -> CheckpointError:
    near = difflib.get_close_matches(name, known, n=4, cutoff=0.5) or list(known[:6])
    return _bad(arch, f"no {name!r} there", f"near names: {', '.join(near) or 'none'}")


def _bad(arch: str, found: str, fix: str) -> CheckpointError:
    return CheckpointError(where=f"--arch {arch}", found=found, allowed=ARCH_FORMS, fix=fix)
