"""A file that was just written, read in this process and compared with the model, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from bp_convert.errors import VerificationError
from bp_convert.files.atomic import Prove
from bp_convert.files.bits import digests
from bp_convert.files.converted import read_converted
from bp_convert.files.sniff import Kind, kind_of
from bp_convert.files.tensors import whole_state
from bp_convert.files.unpickle import listed, load_written, names_in
from bp_convert.files.writable import plain_name
from bp_convert.pickles.meaning import meanings


def read_back(model: nn.Module, path: Path, *, trust: Sequence[str] = ()) -> Prove:
    """Return what reads a file of ``model`` before it takes its name ``path``.

    Args:
        trust: packages and Python files that will be trusted when it is loaded.
    """

    def prove(places: Sequence[Path]) -> None:
        compare(
            path,
            bits_of(model),
            {plain_name(name): one for name, one in digests(_state_in(places, trust)).items()},
        )

    return prove


def bits_of(model: nn.Module) -> dict[str, str]:
    """Return a hash of each entry of a model's state, by its name in a file."""
    return {plain_name(name): one for name, one in digests(whole_state(model)).items()}


def compare(path: Path, expected: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Compare what a file holds with what it should.

    Raises:
        VerificationError: they differ; names the entries.
    """
    names = [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
    if names:
        raise VerificationError(
            where=str(path),
            found=f"the file as it was written reads otherwise than the model, in {listed(names)}; "
            "it was removed",
            allowed="a file that gives every bit back",
            fix="write it again, or to another disk; if it stays so, please report this model",
        )


def _state_in(places: Sequence[Path], trust: Sequence[str]) -> dict[str, Any]:
    weights, *beside = places
    if kind_of(weights) is Kind.SAFETENSORS:
        return read_converted(weights, beside=beside[0]).state
    known, needed = meanings(names_in(weights), trust)
    content: Any = load_written(weights, known, needed)
    model = content if isinstance(content, nn.Module) else content["skeleton"]
    return whole_state(model) if model is not None else dict(content["state"])
