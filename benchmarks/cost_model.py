"""Measure layers, fit the prices of the cost model, and write ``bp_convert/kinds/speed.json``.

    python benchmarks/cost_model.py [--check] [--add KIND,KIND,...]

Takes a few minutes on a quiet machine. With --check nothing is written and the model's decisions
are compared with a fresh measurement. With --add only these kinds are measured, and LSTMs beside
them, by which their prices are brought to the scale of the machine that the file names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.clock import interleaved, machine, prices
from bp_convert.kinds import Ask, kind_of
from bp_convert.kinds import speed as model

TARGET = Path(model.__file__).with_name("speed.json")


def cases() -> list[tuple[nn.Module, tuple[int, ...]]]:
    """Layers as models have them, with the shapes of their inputs."""
    found: list[tuple[nn.Module, tuple[int, ...]]] = []
    widths = (
        (16, 16),
        (32, 64),
        (64, 10),
        (128, 128),
        (256, 64),
        (256, 256),
        (384, 1536),
        (512, 512),
        (768, 768),
        (768, 3072),
        (1024, 1024),
        (2048, 512),
        (1152, 256),
        (4096, 4096),
    )
    for (inputs, outputs), rows in product(widths, (1, 16, 197)):
        found.append((nn.Linear(inputs, outputs), (rows, inputs)))
    squares = (
        (1, 32, 28),
        (3, 32, 32),
        (3, 64, 112),
        (16, 16, 32),
        (32, 64, 14),
        (32, 32, 32),
        (64, 64, 56),
        (64, 128, 28),
        (128, 128, 28),
        (256, 256, 14),
        (512, 512, 7),
        (24, 144, 28),
        (128, 32, 14),
        (1024, 2048, 7),
    )
    for (inputs, outputs, size), kernel, stride in product(squares, (1, 3), (1, 2)):
        if inputs == 1024 and kernel == 3:
            continue
        conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2)
        found.append((conv, (1, inputs, size, size)))
    for inputs, outputs, kernel, size in ((3, 64, 7, 112), (96, 256, 5, 27), (64, 64, 5, 28)):
        found.append((nn.Conv2d(inputs, outputs, kernel, 1, kernel // 2), (1, inputs, size, size)))
    for inputs, outputs, size in ((128, 16, 32), (64, 64, 256), (1, 128, 1024)):
        conv1 = nn.Conv1d(inputs, outputs, 9, 1, 4)
        found.append((conv1, (1, inputs, size)))
        long = nn.Conv2d(inputs, outputs, (64, 1), 1, (32, 0))
        found.append((long, (1, inputs, size, 1)))
    for inputs, outputs in ((3, 16), (32, 32), (64, 64)):
        found.append((nn.Conv3d(inputs, outputs, 3, 1, 1), (1, inputs, 8, 16, 16)))
    for (rows, columns), tokens in product(((1000, 64), (30522, 384), (8256, 256)), (8, 128)):
        found.append((nn.Embedding(rows, columns), (1, tokens)))
    tables, bags = (
        ((1000, 16), (10_000, 64), (100_000, 128)),
        ((1, 5), (1, 40), (128, 20), (512, 5)),
    )
    for (rows, columns), shape in product(tables, bags):
        found.append((nn.EmbeddingBag(rows, columns, mode="sum"), shape))
    for stack in (nn.LSTM, nn.GRU, nn.RNN):
        sizes = ((32, 64), (40, 256), (128, 512), (256, 1000))
        for (inputs, hidden), steps in product(sizes, (8, 40)):
            found.append((stack(inputs, hidden, batch_first=True), (1, steps, inputs)))
        for (inputs, hidden), batch in product(((32, 64), (256, 256), (128, 512)), (8, 32)):
            found.append((stack(inputs, hidden, batch_first=True), (batch, 20, inputs)))
    for cell in (nn.LSTMCell, nn.GRUCell, nn.RNNCell):
        sizes = ((32, 64), (64, 128), (256, 256), (128, 512), (512, 1024))
        for (inputs, hidden), batch in product(sizes, (1, 8, 32)):
            found.append((cell(inputs, hidden), (batch, inputs)))
    return found


def measured(only: Collection[str] = ()) -> list[dict[str, Any]]:
    """Time every case, dense and converted, and count what the model counts.

    Args:
        only: names of kinds; none for all.
    """
    rows = []
    for module, shape in cases():
        kind = kind_of(module)
        assert kind is not None
        if only and kind.name not in only:
            continue
        for rank in (1, 4, 0.5, 0.1):
            widths = kind.widths(module)
            factors = kind.factor(module, widths, Ask(rank=rank))
            twin = kind.build(module, widths, factors, "cpu").eval()
            x = torch.zeros(shape, dtype=torch.long) if kind.lookup else torch.randn(shape)
            with torch.no_grad():
                times = interleaved([lambda m=module, x=x: m(x), lambda m=twin, x=x: m(x)], 11)
            both = kind.operations(module, widths, factors, shape)
            rows.append(
                {
                    "kind": kind.name,
                    "case": f"{module} {shape} R{rank}",
                    "times": times,
                    "counts": both,
                }
            )
    return rows


def fit(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the prices of every kind, dense and converted."""
    found: dict[str, dict[str, float]] = {}
    families = {"Conv1d": "Conv", "Conv2d": "Conv", "Conv3d": "Conv"}
    for kind in {families.get(row["kind"], row["kind"]) for row in rows}:
        mine = [row for row in rows if families.get(row["kind"], row["kind"]) == kind]
        for side, name in enumerate(("dense", "twin")):
            of_side = prices(
                [
                    (r["counts"][side], r["times"][side])
                    for r in mine
                    if side == 0 or r["counts"][0] is not r["counts"][1]
                ]
            )
            members = [k for k, f in families.items() if f == kind] or [kind]
            found.update({f"{member}.{name}": of_side for member in members})
    return found


def judge(rows: list[dict[str, Any]], known: dict[str, dict[str, float]]) -> None:
    """Print where the model and the measurement disagree on which is faster."""
    wrong = []
    for row in rows:
        if row["counts"][0] is row["counts"][1]:
            continue
        times = [
            sum(known[f"{row['kind']}.{side}"].get(n, 0.0) * c for n, c in counted.items())
            for side, counted in zip(("dense", "twin"), row["counts"], strict=True)
        ]
        told, seen = times[0] / times[1], row["times"][0] / row["times"][1]
        if (told >= 1) != (seen >= 1):
            wrong.append((told, seen, row["case"]))
    print(f"{len(rows)} layers, {len(wrong)} judged wrong")
    for told, seen, case in sorted(wrong, key=lambda w: w[1]):
        print(f"  predicted {told:.2f}x, measured {seen:.2f}x  {case}")


def add(kinds: Sequence[str]) -> None:
    """Measure a few kinds, and write their prices beside the others."""
    made = json.loads(TARGET.read_text())
    rows = measured((*kinds, "LSTM"))
    ratios = [
        sum(made["prices"]["LSTM.dense"].get(n, 0.0) * c for n, c in row["counts"][0].items())
        / row["times"][0]
        for row in rows
        if row["kind"] == "LSTM"
    ]
    scale = median(ratios)
    fitted = fit([row for row in rows if row["kind"] in kinds])
    judge([row for row in rows if row["kind"] in kinds], fitted)
    for name, counted in fitted.items():
        made["prices"][name] = {what: scale * price for what, price in counted.items()}
    made["prices"] = dict(sorted(made["prices"].items()))
    made.setdefault("added", {})[",".join(kinds)] = f"{machine()}, times {scale:.2f}"
    TARGET.write_text(json.dumps(made, indent=1) + "\n")
    print(f"wrote {TARGET.name}: {made['added']}")


def main() -> None:
    torch.manual_seed(0)
    if "--add" in sys.argv:
        add(sys.argv[sys.argv.index("--add") + 1].split(","))
        return
    rows = measured()
    if "--check" in sys.argv:
        judge(rows, json.loads(TARGET.read_text())["prices"])
        return
    fitted = fit(rows)
    judge(rows, fitted)
    made = {
        "command": "python benchmarks/cost_model.py",
        "machine": machine(),
        "unit": "microseconds each",
        "prices": dict(sorted(fitted.items())),
    }
    TARGET.write_text(json.dumps(made, indent=1) + "\n")
    print(f"wrote {TARGET.name}: {made['machine']}")


if __name__ == "__main__":
    main()
