"""Whole models planned at a quarter of their parameters, timed against themselves.

    python benchmarks/planned_speed.py [--only MODEL] [SHARE ...]

For batches of 1 and 32: milliseconds before and after, in turn in one run, and their ratio; above 1
the planned model is faster. Planning looks at the weights alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
import bp_convert
from benchmarks.targets import MODELS
from benchmarks.timing import machine
from bp_convert.costs import measure
from bp_convert.search.choose import SLOWER


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shares", nargs="*", type=float, default=[0.25])
    parser.add_argument("--only", choices=MODELS, action="append")
    asked = parser.parse_args()
    print(f"{machine()}\n\n| model | parameters | batch | before, ms | after, ms | ratio | note |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | --- |", flush=True)
    for name in asked.only or MODELS:
        make, inputs = MODELS[name]
        model = make()
        for share in asked.shares:
            plan = bp_convert.plan(model, target=f"params={share}", inputs=inputs)
            small = bp_convert.apply(model, plan)
            note = "planned as slower" if SLOWER in plan.notes else ""
            for batch in (1, 32):
                found = measure(model, small, plan.inputs, batch=batch)
                print(
                    f"| {name} | {100 * plan.params.ratio:.1f} % | {batch} | "
                    f"{found.dense_ms:.2f} | {found.converted_ms:.2f} | "
                    f"{found.speedup:.2f} | {note} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
