"""Training settings written on a command line as KEY=VALUE."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bp_convert.errors import TrainingError

if TYPE_CHECKING:
    from bp_convert.values.training import Training

# Where a run is kept and what it may do: no settings of it, but beside them on the command line
BESIDE = ("folder", "resume", "download")


def training_from(
    words: Sequence[str], flags: Mapping[str, Any], option: str
) -> tuple[Training, dict[str, Any]]:
    """Read training settings.

    Args:
        words: ``KEY=VALUE``, several in one word if need be; ``distill.logits=0.5`` reaches in.
        flags: settings that have an option of their own; they win.
        option: name of the option that the words come from, for errors.

    Returns:
        The settings, and what was said of ``BESIDE``.

    Raises:
        TrainingError: a word of another form, an unknown key, or a value that is not valid.
    """
    from pydantic import ValidationError

    from bp_convert.values.explain import explained
    from bp_convert.values.training import Training

    given: dict[str, Any] = {}
    for word in (one for text in words for one in shlex.split(text)):
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise TrainingError(
                where=f"{option} {word}",
                found="no KEY=VALUE",
                allowed="a training setting and its value, such as epochs=3",
                fix="write KEY=VALUE; values with spaces need quotes",
            )
        _put(given, key.replace("-", "_").split("."), _value(value), f"{option} {word}")
    beside = {key: given.pop(key) for key in BESIDE if key in given}
    try:
        return Training.model_validate({**given, **flags}), beside
    except ValidationError as problem:
        raise explained(problem, option, BESIDE) from None


def _put(given: dict[str, Any], keys: list[str], value: Any, where: str) -> None:
    for key in keys[:-1]:
        given = given.setdefault(key, {})
        if not isinstance(given, dict):
            raise TrainingError(
                where=where,
                found=f"{key} with a value of its own",
                allowed=f"either {key}=... or {'.'.join(keys)}=...",
                fix="give one of them",
            )
    given[keys[-1]] = value


def _value(text: str) -> Any:
    import yaml

    try:
        return float(text)  # YAML takes 1e-3 for a word
    except ValueError:
        pass
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return found if isinstance(found, bool | list | dict | None) else text


def tokenizer_beside(model: str, arch: str | None, named: Path | None) -> Path | None:
    """Return the folder of the tokenizer: the one named, or the model's own."""
    from bp_convert.data.tokenizers import tokenizer_in

    return named or tokenizer_in(model, arch)
