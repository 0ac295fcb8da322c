"""Examples for one use: of whatever holds data, or of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from bp_convert.data.dataset import Rows, Stream
from bp_convert.data.examples import Examples
from bp_convert.data.factory import Data, open_data, tensor_rows
from bp_convert.data.share import EXAMPLES, Share, at_least_one, first_rows, shuffled
from bp_convert.data.split import Uses, split_for
from bp_convert.values.settings import Settings
from bp_convert.values.tensors import TensorSpec


def examples_for(
    model: nn.Module,
    data: Data,
    settings: Settings | None = None,
    *,
    count: int = EXAMPLES,
    batch: int = 32,
    tokenizer: str | Path | None = None,
) -> Examples:
    """Turn whatever holds data into examples that fit ``model``.

    Args:
        data: Examples are returned as they are; a tensor, a mapping by forward's keywords or a
            sequence of tensors; a loader; or a source such as a folder of images.
        settings: their ``inputs`` describe what the model takes; inferred where there are none.
        count: examples at most, chosen by the settings' seed.
        batch: examples in a batch.
        tokenizer: folder of the tokenizer, for text.

    Raises:
        DataError: the data cannot be read or does not fit.
    """
    uses = Uses(calibrate=data, count=count)
    split = split_for(model, uses, settings, batch=batch, tokenizer=tokenizer)
    assert split.calibrate is not None
    return split.calibrate.examples


def load_examples(
    data: Data,
    specs: Sequence[TensorSpec] = (),
    *,
    count: int = EXAMPLES,
    batch: int = 32,
    seed: int = 0,
    tokenizer: str | Path | None = None,
) -> Examples:
    """Load examples of a source, for no model in particular.

    Args:
        data: as ``bp_convert.data.factory.open_data`` takes it. Of a stream the first ``count``
            are taken; of any other source a seeded choice.
        specs: the inputs; empty where nothing is known of them, and then nothing is checked.
        count: examples wanted; fewer are taken where there are fewer, and ``source`` says so.
        batch: examples in a batch.
        seed: of the choice, and of a loader's own shuffling.
        tokenizer: folder of a transformers tokenizer, for text.

    Raises:
        DataError: the source cannot be read, is empty, or does not fit ``specs``.
    """
    return _first(open_data(data, specs, seed=seed, tokenizer=tokenizer), count, batch, seed)


def from_tensors(
    inputs: Tensor | Mapping[str, Tensor] | Sequence[Tensor],
    labels: Tensor | None = None,
    specs: Sequence[TensorSpec] = (),
    *,
    count: int | None = None,
    batch: int = 32,
    seed: int = 0,
) -> Examples:
    """Make examples of tensors in memory.

    Args:
        inputs: (N, ...), for a forward of one input; a mapping by forward's keywords; or a
            sequence of the positional inputs, each (N, ...).
        labels: (N, ...), or None.
        specs: the model's inputs, to check against.
        count: examples to choose as ``load_examples`` does; None takes all, in their order.
        batch: examples in a batch.
        seed: of the choice.

    Raises:
        DataError: there is no example, or the tensors do not fit each other or the model.
    """
    data = tensor_rows(inputs, labels, specs, "data tensors", "tensors")
    if count is not None:
        return _first(data, count, batch, seed)
    rows = sorted(shuffled(data, seed))
    at_least_one(len(rows), batch, data.where)
    return Share(data, tuple(rows), batch=batch).examples


def _first(data: Rows | Stream, count: int, batch: int, seed: int) -> Examples:
    at_least_one(count, batch, data.where)
    rows = None
    if isinstance(data, Rows):
        rows = tuple(first_rows(shuffled(data, seed), count))
    return Share(data, rows, count, batch=batch).examples
