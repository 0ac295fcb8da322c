"""Measure layers, fit the prices of the cost model, and write ``bp_convert/kinds/speed.json``.

    python benchmarks/cost_model.py [--check] [--add KIND,KIND,...]

These are the prices that are shipped, and hold where ``bp-convert tune`` has not run; both measure
the same layers in the same way. Takes two minutes on a quiet machine. With --check nothing is
written and the model's decisions are compared with a fresh measurement. With --add only these kinds
are measured, and LSTMs beside them, by which their prices are brought to the scale of the machine
that the file names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.clock import machine
from bp_convert.kinds import kind_of
from bp_convert.kinds import speed as model
from bp_convert.prices import Prices
from bp_convert.tuning.layer_grid import grid
from bp_convert.tuning.machine_table import Host
from bp_convert.tuning.price_fit import Sample, fit, off
from bp_convert.tuning.tuner import lows, timed

TARGET = Path(model.__file__).with_name("speed.json")


def measured(only: Collection[str] = ()) -> list[Sample]:
    """Time every case, dense and converted, and count what the model counts.

    Args:
        only: names of kinds; none for all.
    """
    found: list[Sample] = []
    for case in grid():
        kind = kind_of(case.make())
        if kind is not None and (not only or kind.name in only):
            with torch.no_grad():
                found += timed(case, Host("cpu", torch.get_num_threads()), lows)
    return found


def judge(samples: Sequence[Sample], known: Prices) -> None:
    """Print where the model and the measurement disagree on which is faster."""
    wrong = []
    apart = [one for one in samples if one.told_apart]
    for one in apart:
        dense, twin = one.told(known)
        told, seen = dense / twin, one.times[0] / one.times[1]
        if (told >= 1) != (seen >= 1):
            wrong.append((told, seen, one.words))
    print(
        f"{len(apart)} layers, {len(wrong)} judged wrong; times are off by "
        f"{100 * off(known, samples):.0f} % (median)"
    )
    for told, seen, case in sorted(wrong, key=lambda w: w[1]):
        print(f"  predicted {told:.2f}x, measured {seen:.2f}x  {case}")


def add(kinds: Sequence[str]) -> None:
    """Measure a few kinds, and write their prices beside the others."""
    made = json.loads(TARGET.read_text())
    samples = measured((*kinds, "LSTM"))
    scale = median(
        one.told(made["prices"])[0] / one.times[0] for one in samples if one.kind == "LSTM"
    )
    mine = [one for one in samples if one.kind in kinds]
    fitted = fit(mine)
    judge(mine, fitted)
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
    samples = measured()
    if "--check" in sys.argv:
        judge(samples, json.loads(TARGET.read_text())["prices"])
        return
    fitted = fit(samples)
    judge(samples, fitted)
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
