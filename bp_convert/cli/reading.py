"""Flags, KEY=VALUE words and settings files read into the values that they stand for."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bp_convert.errors import PlanError, TrainingError
from bp_convert.run.written import Outputs
from bp_convert.values.explain import validated
from bp_convert.values.marks import read_tree, read_word
from bp_convert.values.reconstruction import Reconstruct
from bp_convert.values.settings import Settings
from bp_convert.values.target import Target

if TYPE_CHECKING:
    from bp_convert.values.training import Training

BESIDE = ("folder", "resume", "download")  # no settings of training, but of its run


def settings_from(path: Path | None = None, **flags: Any) -> Settings:
    """Merge a settings file with the flags that were given; flags win.

    Args:
        flags: settings by name; None and False stand for flags that were not given.

    Raises:
        RecipeError: the file cannot be read or holds something that is no setting.
        PlanError: a flag's value is not valid.
    """
    given = {name: one for name, one in flags.items() if one is not None and one is not False}
    asked = validated(Settings, given, "setting", error=PlanError)
    if path is None:
        return asked
    read = validated(Settings, read_tree(path))
    merged = {name: getattr(one, name) for one in (read, asked) for name in one.model_fields_set}
    tuned = [one.reconstruct for one in (read, asked) if isinstance(one.reconstruct, Reconstruct)]
    if len(tuned) > 1:  # a flag says some of it only
        merged["reconstruct"] = {
            name: getattr(one, name) for one in tuned for name in one.model_fields_set
        }
    return validated(Settings, merged, "setting", error=PlanError)


def training_from(words: Sequence[str], option: str, **flags: Any) -> tuple[Training, Outputs]:
    """Read training settings.

    Args:
        words: ``KEY=VALUE``, several in one word if need be; ``distill.logits=0.5`` reaches in.
        option: name of the option that the words come from, for errors.
        flags: settings that have an option of their own; they win. None was not given.

    Returns:
        The settings, and where the run is kept and what it may do.

    Raises:
        TrainingError: a word of another form, an unknown key, or a value that is not valid.
    """
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
        _put(given, key.replace("-", "_").split("."), read_word(value), f"{option} {word}")
    folder, resume, download = (given.pop(name, None) for name in BESIDE)
    outputs = Outputs(
        checkpoints=None if folder is None else Path(str(folder)),
        resume=bool(resume),
        download=bool(download),
    )
    given.update((name, one) for name, one in flags.items() if one is not None)
    return validated(Training, given, option, error=TrainingError, beside=BESIDE), outputs


def training_for(
    words: Sequence[str] | None, calibrate: str | None
) -> tuple[Training | None, Outputs]:
    """Read ``--finetune``; the data of ``--calibrate`` is trained on where it names none.

    Raises:
        TrainingError: a setting is not valid, or there is no data.
    """
    if not words:
        return None, Outputs()
    settings, outputs = training_from(words, "--finetune")
    if settings.data is None:
        if calibrate is None:
            raise TrainingError(
                where="--finetune",
                found="no data",
                allowed="--finetune data=SOURCE, or --calibrate SOURCE",
                fix="name the data to train on, such as --finetune data=FashionMNIST",
            )
        settings = settings.model_copy(update={"data": calibrate})
    return settings, outputs


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


def several(texts: Sequence[str]) -> list[Target]:
    """Read targets, of which one may give several limits: ``params=0.5,0.25``.

    Raises:
        PlanError: a text that is no target.
    """
    found = []
    for text in texts:
        name, equals, limits = text.rpartition("=")
        found += [Target.parse(f"{name}{equals}{limit}") for limit in limits.split(",")]
    return list(dict.fromkeys(found))
