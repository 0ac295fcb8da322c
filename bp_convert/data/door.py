"""Whatever holds data turned into examples for a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bp_convert.data.examples import Examples
from bp_convert.data.load import from_loader, from_tensors, load_examples
from bp_convert.data.loader import is_item, is_structure
from bp_convert.data.rows import Part
from bp_convert.data.source import Source
from bp_convert.errors import DataError
from bp_convert.graph.example import SampleInputs
from bp_convert.graph.inputs import bounded, infer_input, runs
from bp_convert.values.settings import Settings
from bp_convert.values.tensors import TensorSpec
from bp_convert.values.training import Training

Data = Examples | Tensor | Mapping[str, Tensor] | Iterable[Any] | str | Path
EXAMPLES = 512  # that are taken of a source, where the caller does not say


def examples_for(
    model: nn.Module,
    data: Data,
    settings: Settings | None = None,
    *,
    part: Part = "calibrate",
    count: int = EXAMPLES,
    batch: int = 32,
    held_out: int = 0,
    spare: float | None = None,
    tokenizer: str | Path | None = None,
) -> Examples:
    """Turn whatever holds data into examples that fit ``model``.

    Args:
        data: Examples are returned as they are; a tensor, a mapping by forward's keywords or a
            sequence of tensors; a loader; or a source such as a folder of images.
        settings: their ``inputs`` describe what the model takes; inferred where there are none.
        part: what for: evaluation never takes what calibration took.
        count: examples at most, chosen by the settings' seed.
        held_out: how many examples calibration took of the same source.
        spare: share of it that is left to training, where that takes the same source, as
            ``spare_of`` says; None where it does not.
        tokenizer: folder of the tokenizer, for text.

    Raises:
        DataError: the data cannot be read or does not fit.
    """
    if isinstance(data, Examples):
        return data
    settings = settings or Settings()
    specs = specs_of(model, settings.inputs)
    known: dict[tuple[TensorSpec, tuple[int, ...]], bool] = {}

    def accepts(spec: TensorSpec, shape: tuple[int, ...]) -> bool:
        if (spec, shape) not in known:
            other = spec.model_copy(update={"shape": shape})
            known[spec, shape] = runs(
                model, SampleInputs(tuple(other if s == spec else s for s in specs))
            )
        return known[spec, shape]

    asked: dict[str, Any] = {
        "accepts": accepts,
        "count": count,
        "batch": batch,
        "seed": settings.seed,
        "part": part,
        "held_out": held_out,
        "spare": spare,
    }
    if isinstance(data, str | Path):
        return load_examples(data, specs, tokenizer=tokenizer, **asked)
    if isinstance(data, Mapping) and len(data) == len(specs) == 1 and specs[0].name is None:
        data = next(iter(data.values()))  # the only input, whatever forward calls it
    if not settings.inputs and not isinstance(data, Iterator):
        try:
            return _of_values(data, specs, asked)
        except DataError:
            # What the data looks like says more than a guess, where the model runs on it.
            with suppress(DataError):
                found = _of_values(data, (), asked)
                if runs(model, SampleInputs(given=found.batches[0])):
                    return found
            raise
    return _of_values(data, specs, asked)


def _of_values(data: Any, specs: Sequence[TensorSpec], asked: dict[str, Any]) -> Examples:
    if isinstance(data, Tensor):
        return from_tensors(data, specs=specs, **asked)
    if is_item(data):
        return from_loader(data, specs, source="tensors", **asked)
    return from_loader([data] if is_structure(data) else data, specs, **asked)


def held_back(calibrate: Data | None, evaluate: Data, taken: Examples | None) -> int:
    """Return how many examples evaluation has to leave out because calibration took them."""
    if taken is None:
        return 0
    if isinstance(calibrate, str | Path) and isinstance(evaluate, str | Path):
        return taken.count if same_source(calibrate, evaluate) else 0
    return taken.count if calibrate is evaluate and not isinstance(evaluate, Examples) else 0


def rows_within(
    learnt: str | Path, source: str | Path | None, taken: Examples | None
) -> tuple[int, ...] | None:
    """Return which rows of the source that is learnt from the examples ``taken`` of ``source`` are.

    None where that is not known: it is one source, which can only be read from its start.
    """
    if source is None or taken is None or not same_source(learnt, source):
        return ()
    return taken.rows


def spare_of(
    training: Training | None, source: str | Path, evaluate: str | Path | None
) -> float | None:
    """Return the share of a source that calibration leaves to training, None where that takes
    another: what is validated on, and as much again where it is scored as well.
    """
    if training is None or training.data is None or not same_source(training.data, source):
        return None
    share = training.validation if isinstance(training.validation, float) else 0.0
    scored = evaluate is not None and same_source(source, evaluate)
    return min(0.5, 2 * share if scored else share)


def same_source(one: str | Path, two: str | Path) -> bool:
    """Return whether both name one source, options such as ``?mean=`` aside."""
    first, second = Source.parse(one), Source.parse(two)
    if first.name == second.name:
        return True
    return first.path.exists() and second.path.exists() and first.path.samefile(second.path)


def specs_of(model: nn.Module, inputs: Sequence[TensorSpec] = ()) -> tuple[TensorSpec, ...]:
    """Return what a model takes: as described, or inferred; empty where that is not known.

    Token ids get the bound of the table that they are looked up in, so that a tokenizer of another
    vocabulary is found out.
    """
    return bounded(model, tuple(inputs) or (infer_input(model) or ((), ""))[0])
