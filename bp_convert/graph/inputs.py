"""Guessing an example input, where the model's type or its first layer tells."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from bp_convert.errors import PlanError
from bp_convert.graph.example import make_inputs
from bp_convert.graph.verify import ForwardError, Trial
from bp_convert.values.tensors import TensorSpec

Guess = tuple[tuple[TensorSpec, ...], str]

_STEPS = 8
_SIZES = {
    1: (16000, 4096, 1024, 256, 64, 16),
    2: (224, 64, 32, 28, 96, 128, 299, 16, 8),
    3: (112, 64, 32, 16, 8),
}
_FRAMES = 16
_INPUT_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.Embedding, nn.RNNBase)


def infer_input(model: nn.Module) -> Guess | None:
    """Guess one example input on which ``model`` runs, and say in words what was assumed.

    Candidates come from the model's library (torchvision, timm, transformers) and from its first
    layer; each is tried without data, and the first that runs is taken.

    Returns:
        The inputs without their batch axis and the words, or None where nothing was found.
    """
    try:
        trial = Trial(model)
    except (PlanError, ValueError, RuntimeError):
        return None
    for specs, words in _candidates(model):
        args, kwargs = make_inputs(model, specs, batch=2)
        try:
            trial.run(args, kwargs, training=False)
        except ForwardError:
            continue
        return specs, f"input {' and '.join(str(spec) for spec in specs)}: {words}"
    return None


def _needs_several(model: nn.Module) -> bool:
    """Return whether the forward wants more than one input."""
    parameters = inspect.signature(model.forward).parameters.values()
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.default is inspect.Parameter.empty and p.kind in plain]
    return len(needed) > 1


def _candidates(model: nn.Module) -> Iterator[Guess]:
    if type(model).__module__.startswith("bp_convert.models."):
        yield from _of_the_paper(model)
    for spec, words in [*_from_library(model), *_from_first_layer(model)]:
        yield (spec,), words


def _of_the_paper(model: nn.Module) -> Iterator[Guess]:
    image = getattr(model, "image", None)
    words = getattr(model, "words", None)
    if isinstance(image, nn.Linear) and isinstance(words, nn.Embedding):
        ids = TensorSpec(dtype="int64", shape=(_STEPS,), high=words.num_embeddings)
        yield (TensorSpec(shape=(image.in_features,)), ids), "image features and words"
    yield (TensorSpec(shape=(3, 32, 32)),), "the images of the paper's experiments"


def _from_first_layer(model: nn.Module) -> Iterator[tuple[TensorSpec, str]]:
    if _needs_several(model):
        return
    layers = ((n, m) for n, m in model.named_modules() if isinstance(m, _INPUT_LAYERS))
    name, first = next(layers, ("", None))
    name = name or "the model itself"
    if isinstance(first, nn.Embedding):
        yield (
            TensorSpec(dtype="int64", shape=(_STEPS,), high=first.num_embeddings),
            f"{_STEPS} ids below {first.num_embeddings}, from its first layer {name}",
        )
    elif isinstance(first, nn.RNNBase):
        order = "" if first.batch_first else ", the batch on its second axis"
        yield (
            TensorSpec(shape=(_STEPS, first.input_size)),
            f"{_STEPS} steps of {first.input_size} features, from its first layer {name}{order}",
        )
    elif isinstance(first, nn.Linear):
        words = f"{first.in_features} features, from its first layer {name}"
        yield TensorSpec(shape=(first.in_features,)), words
        yield TensorSpec(shape=(_STEPS, first.in_features)), f"{_STEPS} steps of {words}"
    elif isinstance(first, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        yield from _images(name, first)


def _images(
    name: str, first: nn.Conv1d | nn.Conv2d | nn.Conv3d
) -> Iterator[tuple[TensorSpec, str]]:
    axes, channels = len(first.kernel_size), first.in_channels
    sizes = _SIZES[axes]
    if axes == 2 and channels == 1:
        sizes = (28, 32, *sizes)
    for size in dict.fromkeys(sizes):
        shape = (size,) * axes if axes < 3 else (_FRAMES, size, size)
        yield (
            TensorSpec(shape=(channels, *shape)),
            f"{channels} channels from its first layer {name}, size {size} because it runs",
        )


def _from_library(model: nn.Module) -> Iterator[tuple[TensorSpec, str]]:
    library = type(model).__module__
    kind = type(model).__name__
    if library.startswith("torchvision.models.video"):
        yield TensorSpec(shape=(3, _FRAMES, 112, 112)), f"usual for torchvision's {kind}"
    elif library.startswith("torchvision.models."):
        size = 299 if kind == "Inception3" else 224
        yield TensorSpec(shape=(3, size, size)), f"usual for torchvision's {kind}"
    settings = getattr(model, "pretrained_cfg", None)
    if isinstance(settings, dict) and "input_size" in settings:
        yield TensorSpec(shape=tuple(settings["input_size"])), "from timm's settings of the model"
    config = getattr(model, "config", None)
    if library.startswith("transformers.") and config is not None:
        yield from _from_config(str(getattr(model, "main_input_name", "")), config)


def _from_config(name: str, config: Any) -> Iterator[tuple[TensorSpec, str]]:
    words = "from the model's configuration"
    vocabulary = getattr(config, "vocab_size", None)
    if name == "input_ids" and isinstance(vocabulary, int):
        yield TensorSpec(name=name, dtype="int64", shape=(_STEPS,), high=vocabulary), words
    side = getattr(config, "image_size", None)
    if name == "pixel_values":
        channels = int(getattr(config, "num_channels", 3))
        for size in [side] if isinstance(side, int) else [224, 64]:
            yield TensorSpec(name=name, shape=(channels, size, size)), words
