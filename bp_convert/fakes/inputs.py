"""Example inputs on which a model really runs: as described, or guessed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from bp_convert.errors import BpConvertError, PlanError, TraceError
from bp_convert.fakes.fake_run import FakeRun, ForwardError
from bp_convert.graph.clone import clone
from bp_convert.graph.example import SampleInputs, tables
from bp_convert.graph.running import Args, Kwargs, inference, run
from bp_convert.graph.tree import tensors_in
from bp_convert.kinds import relative_of
from bp_convert.kinds.conv_kind import FRAMES
from bp_convert.kinds.kind import STEPS
from bp_convert.values.tensors import TensorSpec

Guess = tuple[tuple[TensorSpec, ...], str]


def infer_input(model: nn.Module) -> Guess | None:
    """Guess one example input on which ``model`` runs, and say in words what was assumed.

    Candidates come from the model's library (torchvision, timm, transformers) and from its first
    layer; each is tried without data or, where the model looks at its data, on a copy with some,
    and the first that runs is taken.

    Returns:
        The inputs without their batch axis and the words, or None where nothing was found.
    """
    try:
        trial = FakeRun(model)
    except (PlanError, ValueError, RuntimeError):
        return None
    likely = [(spec,) for spec, _ in _from_library(model)]  # some kernels refuse fake tensors alone
    for specs, words in _candidates(model):
        sample = SampleInputs(specs)
        try:
            trial.run(*sample.batch(model, 2), training=False)
        except ForwardError as stopped:
            if not (stopped.looks_at_data or specs in likely) or not runs(model, sample):
                continue
        return specs, f"input {' and '.join(str(spec) for spec in specs)}: {words}"
    return None


def settle(model: nn.Module, specs: Sequence[TensorSpec]) -> SampleInputs:
    """Return what ``specs`` describe, read in the way in which the model runs on it.

    A copy of the model runs on what is drawn. Where it does not, other readings are tried: three
    numbers may be one channel's, and integers such as lengths may have to be above 0. Integers
    without a bound get that of the table which they reach.

    Raises:
        TraceError: it runs in no reading; the message is that of the first.
    """
    first: BpConvertError | None = None
    for variant, words in _readings(bounded(model, tuple(specs))):
        sample = SampleInputs(variant, words=words)
        try:
            try_on(model, sample)
        except BpConvertError as problem:
            first = first or problem
        else:
            return sample
    assert first is not None
    raise first


def runs(model: nn.Module, sample: SampleInputs) -> bool:
    """Return whether a copy of the model runs on the sample in eval mode."""
    with suppress(BpConvertError):
        try_on(model, sample)
        return True
    return False


def settle_values(model: nn.Module, sample: SampleInputs) -> SampleInputs:
    """Return example inputs that are values, found out whether the model takes some of them.

    The first axis of each tensor, or a list, is read as the examples; where the model does not
    run on one of them, as on the edges of a graph, all belong together.

    Raises:
        TraceError: the model does not run on them.
    """
    if any(one.is_meta for one in model.parameters()):
        return sample
    try:
        try_on(model, sample)
    except TraceError:
        sample = replace(sample, specs=(), whole=True)
        try_on(model, sample)
    return sample


def try_on(model: nn.Module, sample: SampleInputs) -> Any:
    """Run a copy of the model on the sample in eval mode; return its output.

    Raises:
        TraceError: the forward raised.
        PlanError: the model cannot be copied.
    """
    copy = clone(model, apart=True)
    args, kwargs = sample.batch(copy, 1)
    if not sample.real:
        _to_their_least(sample.specs, args, kwargs)
    with inference(copy):
        return run(copy, args, kwargs)


def _to_their_least(specs: Sequence[TensorSpec], args: Args, kwargs: Kwargs) -> None:
    """Put the least that may be drawn into drawn integers: a length of 0, say."""
    places = iter(args)
    for spec in specs:
        tensor = next(places) if spec.name is None else kwargs[spec.name]
        if "int" in spec.dtype and tensor.numel():
            tensor.view(-1)[0] = spec.low


def _readings(specs: tuple[TensorSpec, ...]) -> Iterator[Guess]:
    yield specs, ""
    volumes = [i for i, one in enumerate(specs) if one.name is None and len(one.shape) == 3]
    if len(specs) == 1 and volumes and specs[0].dtype.startswith("float"):
        wide = specs[0].model_copy(update={"shape": (1, *specs[0].shape)})
        yield (wide,), f"{specs[0]} is read as one channel of a volume: {wide.dtype}:1x{wide}"
    counts = [i for i, one in enumerate(specs) if one.dtype.startswith(("int", "uint"))]
    highest = max((specs[i].high or 2 for i in counts), default=1)
    for low in dict.fromkeys((1, highest - 1)):
        raised = tuple(
            one.model_copy(update={"low": min(low, (one.high or 2) - 1)})
            if i in counts and one.low < low
            else one
            for i, one in enumerate(specs)
        )
        if raised != specs:
            yield raised, f"integers are drawn from {low} on: the model does not run on smaller"


def bounded(model: nn.Module, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Give integers the number of rows of the table that they reach as their bound, where theirs
    is larger or missing."""
    known = tables(model)
    counts = [i for i, one in enumerate(specs) if "int" in one.dtype]
    if not counts or not known or any(one.is_meta for one in model.parameters()):
        return specs
    lowest = min(rows for _, rows in known)
    drawn = tuple(
        one.model_copy(update={"high": lowest, "low": 0}) if i in counts else one
        for i, one in enumerate(specs)
    )
    alone = len(known) == len(specs) == 1
    reached = {0: lowest} if alone else _reached(model, drawn, counts)
    found = list(specs)
    for i in counts:
        own = specs[i].high
        bound = reached.get(i, lowest if own is None else own)
        if own is None or bound < own:
            found[i] = specs[i].model_copy(
                update={"high": bound, "low": min(specs[i].low, bound - 1)}
            )
    return tuple(found)


def _reached(
    model: nn.Module, specs: tuple[TensorSpec, ...], free: Sequence[int]
) -> dict[int, int]:
    """Return the rows of the smallest table that each input is looked up in, as it is."""
    copy = clone(model, apart=True)
    args, kwargs = SampleInputs(specs).batch(copy, 2, seed=1)
    places = iter(args)
    values = [next(places) if one.name is None else kwargs[one.name] for one in specs]
    itself: dict[int, int] = {}
    alike: dict[int, int] = {}  # by what is equal to it, where it is never looked up itself

    def note(rows: int) -> Any:
        def hook(_: nn.Module, inputs: Any, named: Any) -> None:
            for leaf in tensors_in((inputs, named)):
                for i in free:
                    if leaf.data_ptr() == values[i].data_ptr():
                        itself[i] = min(rows, itself.get(i, rows))
                    elif leaf.shape == values[i].shape and torch.equal(leaf, values[i]):
                        alike[i] = min(rows, alike.get(i, rows))

        return hook

    for module, rows in tables(copy):
        module.register_forward_pre_hook(note(rows), with_kwargs=True)
    with inference(copy), suppress(BpConvertError):  # what it reached before it stopped counts
        run(copy, args, kwargs)
    return {**alike, **itself}


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
        ids = TensorSpec(dtype="int64", shape=(STEPS,), high=words.num_embeddings)
        yield (TensorSpec(shape=(image.in_features,)), ids), "image features and words"
    yield (TensorSpec(shape=(3, 32, 32)),), "the images of the paper's experiments"


def _from_first_layer(model: nn.Module) -> Iterator[tuple[TensorSpec, str]]:
    if _needs_several(model):
        return
    # A transposed layer makes images of what another one gives; in a generator it may be the first.
    for turned in (False, True):
        for name, module in model.named_modules():
            kind = relative_of(module)
            if kind is None or getattr(module, "transposed", False) != turned:
                continue
            found = list(kind.examples(module, name or "the model itself"))
            if found:
                yield from found
                break


def _from_library(model: nn.Module) -> Iterator[tuple[TensorSpec, str]]:
    library = type(model).__module__
    kind = type(model).__name__
    if library.startswith("torchvision.models.video"):
        yield TensorSpec(shape=(3, FRAMES, 112, 112)), f"usual for torchvision's {kind}"
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
        yield TensorSpec(name=name, dtype="int64", shape=(STEPS,), high=vocabulary), words
    side = getattr(config, "image_size", None)
    if name == "pixel_values":
        channels = int(getattr(config, "num_channels", 3))
        for size in [side] if isinstance(side, int) else [224, 64]:
            yield TensorSpec(name=name, shape=(channels, size, size)), words
