"""A stand-in for methods of converted models that would write what cannot be loaded again."""

from __future__ import annotations

from typing import Any

from torch import nn

from bp_convert.errors import CheckpointError

_METHOD = "save_pretrained"


def guard(model: nn.Module) -> None:
    """Let ``save_pretrained`` of a converted model, and of the models in it, refuse.

    It would write weights that ``from_pretrained`` passes over, and starts at random instead.
    """
    for module in model.modules():
        if callable(getattr(type(module), _METHOD, None)):
            vars(module)[_METHOD] = refuse


def unguard(model: nn.Module) -> None:
    """Undo ``guard``."""
    for module in model.modules():
        if vars(module).get(_METHOD) is refuse:
            del vars(module)[_METHOD]


def refuse(*arguments: Any, **options: Any) -> None:
    """Stand for save_pretrained.

    Raises:
        CheckpointError: always.
    """
    raise CheckpointError(
        where="save_pretrained of a converted model",
        found="layers that from_pretrained does not know: it would start them at random",
        allowed="bp_convert.save(model, 'NAME.pt'), and bp_convert.load, which gives it back",
        fix="save it with bp_convert.save, or its plain form: "
        "bp_convert.to_dense(model).save_pretrained(FOLDER). For checkpoints whose weights only "
        "this very model takes again, as a Trainer writes: `del model.save_pretrained`",
    )
