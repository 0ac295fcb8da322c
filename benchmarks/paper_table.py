"""Print the paper's table of parameters from plans: its models, its pairs, alpha 1, 2 and 3.

python benchmarks/paper_table.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torchvision
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
import bp_convert
from bp_convert.models import build


def models() -> dict[str, nn.Module]:
    """Return the models of the table whose architectures are published."""
    return {
        "S-VGG": build("svgg"),
        "ResNet-56": build("resnet56"),
        "MobileNet v2, 10 classes": torchvision.models.mobilenet_v2(num_classes=10),
        "Image captioner": build("captioner"),
    }


def main() -> None:
    print("| model | full | alpha 1 | alpha 2 | alpha 3 |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, model in models().items():
        plans = [
            bp_convert.plan(model, alpha=alpha, pairs="paper", init="random") for alpha in (1, 2, 3)
        ]
        cells = [f"{plans[0].params.before:,}", *(f"{plan.params.after:,}" for plan in plans)]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
