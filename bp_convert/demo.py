"""The demo: two real architectures through the whole command, reloaded in a new process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
import torchvision

from bp_convert.errors import BpConvertError

MODELS = (
    ("resnet18", ["--rank", "0.25"], "a quarter of each layer, fitted to its weights"),
    (
        "squeezenet1_1",
        ["--alpha", "2", "--init", "random"],
        "widened by alpha 2, to be trained afresh",
    ),
)
RELOAD = """
import sys, torch, bp_convert
for path in sys.argv[1:]:
    model = bp_convert.load(path)
    with torch.no_grad():
        logits = model(torch.randn(2, 3, 224, 224))
    count = sum(p.numel() for p in model.parameters())
    print(f"reloaded in a new process: {type(model).__name__}, {count:,} parameters, "
          f"two images in, logits {tuple(logits.shape)} out")
"""


def run(folder: Path) -> None:
    """Convert, show, reload and run each of the demo's models.

    Raises:
        BpConvertError: a conversion or a reload failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    print("bp-convert demo: torchvision architectures; no trained weights ship with torchvision,")
    print("so these weights are random and their fit says nothing about a trained model.\n")
    targets = []
    for name, flags, words in MODELS:
        source, target = folder / f"{name}.pt", folder / f"{name}-bp.pt"
        print(f"== {name}: {words}", flush=True)
        torch.save(torchvision.models.get_model(name), source)
        command = [str(source), *flags, "-o", str(target), "--force"]
        print(f"$ bp-convert {' '.join(command)}", flush=True)
        _call([sys.executable, "-m", "bp_convert", *command], name)
        targets.append(str(target))
        print(flush=True)
    _call([sys.executable, "-c", RELOAD, *targets], "reloading")


def _call(command: list[str], name: str) -> None:
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise BpConvertError(
            where=f"demo, {name}",
            found=f"exit code {done.returncode}",
            allowed="0",
            fix="see the message above",
        )
