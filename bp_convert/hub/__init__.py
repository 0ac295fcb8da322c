"""Folders as transformers writes them: what stands in one, and its model made small again."""

from __future__ import annotations


def rebuilt(name: str) -> type:
    """Return what makes transformers' models of this name small, as their config tells.

    Every folder that is written here names this function.
    """
    from bp_convert.hub.rebuild import rebuilt as made  # takes torch

    return made(name)


def lora_layers() -> dict[type, type]:
    """Return which layer of peft goes around which bilinear layer, for a ``LoraConfig``."""
    from bp_convert.hub.peft_layers import lora_layers as found

    return found()
