"""Convert pickled torchvision models through the command line and reload each in a new process.

python benchmarks/torchvision_alpha.py [--alpha 3] [MODEL ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torchvision

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.timing import machine

MODELS = (
    "vgg11_bn",
    "resnet18",
    "mobilenet_v2",
    "squeezenet1_1",
    "densenet121",
    "efficientnet_b0",
    "convnext_tiny",
    "vit_b_16",
    "shufflenet_v2_x1_0",
)
RELOAD = (
    "import sys, torch, bp_convert\n"
    "model = bp_convert.load(sys.argv[1])\n"
    "with torch.no_grad(): logits = model(torch.randn(2, 3, 224, 224))\n"
    "print(type(model).__name__, tuple(logits.shape))"
)


def main() -> None:
    words = sys.argv[1:]
    alpha = words.pop(words.index("--alpha") + 1) if "--alpha" in words else "3"
    names = [word for word in words if word != "--alpha"] or MODELS
    print(f"{machine()}; --alpha {alpha} --init random")
    print(f"{'model':20s} {'replaced':>9s} {'parameters':>24s} {'seconds':>8s}  reloaded")
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            source, target = Path(folder, f"{name}.pt"), Path(folder, f"{name}-bp.pt")
            torch.save(torchvision.models.get_model(name), source)
            command = [sys.executable, "-m", "bp_convert", str(source), "--alpha", alpha]
            command += ["--init", "random", "--json", "-o", str(target)]
            start = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True)
            seconds = time.perf_counter() - start
            if done.returncode:
                print(f"{name:20s} exit {done.returncode}: {done.stderr.strip()[-300:]}")
                continue
            made = json.loads(done.stdout)
            replaced = sum(layer["action"] == "replaced" for layer in made["plan"]["layers"])
            params = made["plan"]["params"]
            again = subprocess.run(
                [sys.executable, "-c", RELOAD, str(target)], capture_output=True, text=True
            )
            print(
                f"{name:20s} {replaced:4d}/{len(made['layers']):<4d} "
                f"{params['before']:>11,} -> {params['after']:>10,} {seconds:7.1f}  "
                f"{(again.stdout or again.stderr[-200:]).strip()}",
                flush=True,
            )
            source.unlink()
            target.unlink()


if __name__ == "__main__":
    main()
