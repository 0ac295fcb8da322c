"""What must hold for every architecture: converted exactly, or refused for a reason of its own.

python -m tests.fuzz.check SEED [SEED ...]      show these architectures and try them
python -m tests.fuzz.check --to 2000 [--from 0] try all seeds of a range, list what fails
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import bp_convert
from benchmarks.zoo.compare import Leaf, gap, leaves, state_of, tolerance
from benchmarks.zoo.trial import FULL
from bp_convert.errors import BpConvertError
from tests.fuzz.grammar import Case, case

BLAMES = ("report this", "fault of bp-convert", "fault in bp-convert", "internal error")
MODES = ("eval", "train")
ROUNDED = 1e-6
SAVED = 4  # every so many architectures are saved and read again


def check(seed: int) -> str:
    """Try the architecture of a seed; return ``converted``, ``kept`` or ``refused: WHY``.

    Raises:
        AssertionError: it is another function, a refusal blames the tool, or the source changed.
        Exception: whatever else the tool let through.
    """
    source = _used(seed)
    before = state_of(source.model)
    small, told = _converted(source)
    assert state_of(source.model) == before, f"the source changed; {told}"
    if small is None:
        blamed = [one for one in BLAMES if one in told]
        assert not blamed, f"blames itself: {told}"
        return f"refused: {told}"
    if seed % SAVED == 0:
        _check_saved(small, source)
    reference = _used(seed).model.eval()
    wanted = [_answers(reference, source)]
    wanted += [_answers(_settled(reference, small).train(), source)]
    for mode, want, got in zip(MODES, wanted, _both_modes(small, source), strict=True):
        apart, where = gap(want, got)
        if apart > tolerance(want):
            allowed = _shaken(seed)[MODES.index(mode)]
            assert apart <= allowed, f"{mode} mode: differs by {apart:.3g} in {where}"
    return told


def _used(seed: int) -> Case:
    """Return a fresh case, every third as after training: its caches are filled."""
    made = case(seed)
    if seed % 3 == 0:
        _answers(made.model, made)
    return made


def _settled(model: nn.Module, small: nn.Module) -> nn.Module:
    """Leave the weights of eval mode where a conversion does: spectral norm goes on iterating in
    train mode, so that it has another weight there."""
    plain = {name for name, one in small.named_modules() if not parametrize.is_parametrized(one)}
    for name, one in list(model.named_modules()):
        if name in plain and parametrize.is_parametrized(one):
            held: Any = one.parametrizations
            for tensor in list(held):
                parametrize.remove_parametrizations(one, tensor, leave_parametrized=True)
    return model


def _both_modes(model: nn.Module, given: Case) -> list[list[Leaf]]:
    """Return what a model answers in eval mode, and after that in train mode."""
    return [_answers(model.train(mode == "train"), given) for mode in MODES]


def _shaken(seed: int) -> list[float]:
    """Return how far the source's own answers move, in both modes, where what its layers put out is
    rounded to six digits: a norm over a channel that is nearly constant blows rounding up."""
    still, moved = _used(seed), _used(seed)
    noise = torch.Generator().manual_seed(seed)

    def rounded(module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor):
            return output
        size = ROUNDED * output.abs().mean()
        return output + size * torch.randn(output.shape, generator=noise, dtype=output.dtype)

    for one in moved.model.modules():
        if not list(one.children()):
            one.register_forward_hook(rounded)
    pairs = zip(_both_modes(still.model, still), _both_modes(moved.model, still), strict=True)
    return [gap(want, got)[0] for want, got in pairs]


def _converted(given: Case) -> tuple[nn.Module | None, str]:
    """Return the converted model, or None, and what came of it in words."""
    try:
        small, report = bp_convert.convert(given.model, inputs=given.inputs, **FULL)
    except BpConvertError as refusal:
        return None, str(refusal)
    replaced = any(layer.action == "replaced" for layer in report.layers)
    return small, "converted" if replaced else "kept"


def _check_saved(small: nn.Module, given: Case) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "small.pt")
        try:
            bp_convert.save(small, path)
        except BpConvertError:
            assert not list(Path(folder).iterdir()), "a refused save left a file"
            return
        again = bp_convert.load(path, trust=["tests"])
        apart, where = gap(_answers(copy.deepcopy(small), given), _answers(again, given))
        assert apart <= 1e-6, f"read again it differs by {apart:.3g} in {where}"


def _answers(model: nn.Module, given: Case) -> list[Leaf]:
    torch.manual_seed(1)
    random.seed(1)
    x = given.x.clone()
    with torch.no_grad():
        output: Any = model(x=x) if given.keyword else model(x)
    return [(name, one.clone()) for name, one in leaves(output)]


def main() -> None:
    """Try seeds and say what came of each that failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("seeds", type=int, nargs="*")
    parser.add_argument("--from", type=int, default=0, dest="first")
    parser.add_argument("--to", type=int, default=0)
    parser.add_argument("--refusals", action="store_true", help="show what was refused, and why")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for seed in asked.seeds:
        made = case(seed)
        print(seed, made.inputs, made.marks, made.model)
        print(check(seed))
    counts: dict[str, int] = {}
    for seed in range(asked.first, asked.to):
        try:
            found, _, why = check(seed).partition(": ")
            if why and asked.refusals:
                print(f"{seed}: refused: {' '.join(why.split())[:300]}", flush=True)
        except Exception as problem:
            found = "failed"
            words = " ".join(str(problem).split())[:300]
            print(f"{seed}: {type(problem).__name__}: {words}", flush=True)
        counts[found] = counts.get(found, 0) + 1
    if counts:
        print(counts)
    sys.exit(bool(counts.get("failed")))


if __name__ == "__main__":
    main()
