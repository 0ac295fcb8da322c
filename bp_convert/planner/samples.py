"""Which example inputs a model is planned and checked on."""

from __future__ import annotations

from torch import nn

from bp_convert.data import Examples
from bp_convert.errors import DataError, TraceError
from bp_convert.fakes.inputs import infer_input, runs, settle, try_on
from bp_convert.graph.example import SampleInputs, specs_of_batch
from bp_convert.values.settings import Settings

GUESSED = "the model did not run on the input that was assumed; give --input"


def sample_inputs(
    model: nn.Module,
    settings: Settings,
    examples: Examples | None = None,
    given: SampleInputs | None = None,
) -> SampleInputs:
    """Return example inputs on which a copy of the model has run; none where none is known.

    Those that are given as values come first, then those that the settings describe, then the
    calibration data, then a guess. Real ones are preferred for whatever does not need another
    number of them.

    Args:
        given: values on which it has run already.

    Raises:
        TraceError: the model does not run on what was given or described.
        DataError: the model does not run on the calibration data.
    """
    if any(one.is_meta for one in model.parameters()):
        return SampleInputs(settings.inputs or (infer_input(model) or ((), ""))[0])
    if given is not None:
        return given
    sample = settle(model, settings.inputs) if settings.inputs else None
    if examples is not None:
        return _of_examples(model, examples, sample)
    if sample is not None:
        return sample
    specs, words = infer_input(model) or ((), "")
    sample = SampleInputs(specs, words=words)
    if specs and not runs(model, sample):
        return SampleInputs(words=GUESSED)
    return sample


def _of_examples(
    model: nn.Module, examples: Examples, described: SampleInputs | None
) -> SampleInputs:
    batch = examples.batches[0]
    specs = specs_of_batch(*batch) if described is None else described.specs
    words = "inputs like the calibration data" if described is None else described.words
    sample = SampleInputs(specs, batch, words)
    try:
        try_on(model, sample)
    except TraceError as problem:
        raise DataError(
            where=f"calibration data, {problem.where}",
            found=problem.found,
            allowed="data that the model runs on",
            fix="give examples as the model takes them: the same sizes, types and tokenizer",
        ) from problem
    return sample
