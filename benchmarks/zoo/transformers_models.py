"""transformers: tiny configurations of text, vision, audio and multimodal models.

They stand in ``transformers.yaml``: the class; ``config``, where its name is not that of the class
up to its task; ``base`` and ``options`` of the configuration; ``inputs`` or the name of an
``example`` made here; ``gain``, a factor of all weights, where fresh ones are too small to let the
input through; and fields of ``Entry``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from benchmarks.zoo.entry import Call, Entry
from benchmarks.zoo.shrink import lively

TASK = re.compile("(For[A-Z]|LMHead|MTModel|EncoderModel|Model$).*")


def _made(model: str, config: str, options: dict[str, Any], gain: float) -> nn.Module:
    import transformers

    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(gain)
    return lively(made)


def _boxes() -> Call:
    """Return words and the corners of their boxes on a page."""
    corner = torch.randint(0, 30, (2, 8, 2))
    far = corner + torch.randint(0, 30, (2, 8, 2))
    return (), {"input_ids": torch.randint(0, 99, (2, 8)), "bbox": torch.cat([corner, far], -1)}


def _codes() -> Call:
    """Return ids of two codebooks for each of two examples, on one axis."""
    return (), {"input_ids": torch.randint(0, 99, (4, 8))}


EXAMPLES: dict[str, Callable[[], Call]] = {"boxes": _boxes, "codes": _codes}


def _entries() -> tuple[Entry, ...]:
    book = yaml.safe_load(Path(__file__).with_name("transformers.yaml").read_text())
    return tuple(
        _entry(name, book["bases"], book["inputs"], **one) for name, one in book["models"].items()
    )


def _entry(
    name: str,
    bases: dict[str, Any],
    texts: dict[str, str],
    model: str,
    config: str = "",
    base: str = "",
    options: dict[str, Any] | None = None,
    inputs: tuple[str, ...] = (),
    example: str = "",
    gain: float = 1.0,
    **more: Any,
) -> Entry:
    asked = {**bases.get(base, {}), **(options or {})}
    watch = tuple(more.pop("watch", ()))
    return Entry(
        f"transformers/{name}",
        partial(_made, model, config or TASK.sub("", model) + "Config", asked, gain),
        tuple(texts.get(one, one) for one in inputs),
        example=EXAMPLES.get(example),
        watch=watch,
        **more,
    )


ENTRIES = _entries()
