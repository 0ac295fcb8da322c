"""Which layers of torchvision's models can be widened, and how long it takes to find out.

Run: python benchmarks/widths.py [NAME ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torchvision

from bp_convert.graph.walk import walk
from bp_convert.widths.widen import widen

ALPHAS = (2, 3)
NAMES = (
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s"),
    *("googlenet", "inception_v3", "maxvit_t", "mnasnet0_5", "mobilenet_v2"),
    *("mobilenet_v3_small", "regnet_x_400mf", "regnet_y_400mf", "resnet18", "resnet50"),
    *("resnext50_32x4d", "shufflenet_v2_x1_0", "squeezenet1_1", "swin_t", "swin_v2_t"),
    *("vgg11_bn", "vgg16", "vgg16_bn", "vit_b_16", "wide_resnet50_2"),
    *("deeplabv3_mobilenet_v3_large", "fcn_resnet50", "lraspp_mobilenet_v3_large"),
)


def build(name: str) -> torch.nn.Module:
    """Make a model, without memory for its weights where its constructor allows that."""
    extra: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):
        extra["init_weights"] = False
    if name.startswith(("deeplab", "fcn", "lraspp")):
        extra["weights_backbone"] = None
    # regnet's constructor reads numbers off tensors.
    with torch.device("cpu" if name.startswith("regnet") else "meta"):
        return torchvision.models.get_model(name, weights=None, **extra)


def measure(name: str) -> dict[str, Any]:
    """Widen one model at every alpha."""
    model = build(name)
    side = 299 if name == "inception_v3" else 224
    inputs = (torch.empty(2, 3, side, side, device="meta"),)
    targets = {site.name: site.kind.name for site in walk(model)}
    row: dict[str, Any] = {"model": name, "layers": len(targets)}
    for alpha in ALPHAS:
        start = time.process_time()
        plan = widen(model, inputs, {}, alpha=alpha, targets=targets)
        row[f"seconds at {alpha}"] = round(time.process_time() - start, 1)
        row[f"verified at {alpha}"] = plan.failure is None
        row[f"widened at {alpha}"] = sum(t.reason is None for t in plan.targets.values())
        reasons = Counter(t.reason for t in plan.targets.values() if t.reason)
        row["reasons"] = reasons.most_common(3)
        row["failure"] = plan.failure
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--json", type=Path, help="also write the rows here")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| model | verified at 2 / 3 | widened | CPU seconds at 2 / 3 | why not the rest |")
    print("| --- | --- | --- | --- | --- |")
    rows = []
    for name in chosen.names:
        row = measure(name)
        rows.append(row)
        verified = " / ".join("yes" if row[f"verified at {a}"] else "no" for a in ALPHAS)
        seconds = " / ".join(str(row[f"seconds at {a}"]) for a in ALPHAS)
        why = "; ".join(f"{reason} ({count})" for reason, count in row["reasons"])
        counts = f"{row['widened at 3']}/{row['layers']}"
        print(f"| {name} | {verified} | {counts} | {seconds} | {why} |", flush=True)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
