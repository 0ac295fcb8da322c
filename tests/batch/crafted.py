"""Small recipes and models for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from torch import nn

FACTORY = '''
import os
import sys
from pathlib import Path
import torch
from torch import nn

HERE = Path(__file__).parent

def small(seed=0):
    """Note that a job called it, and make a model."""
    if "proof" not in sys.argv[0]:
        with open(HERE / "starts.txt", "a") as opened:
            opened.write(f"{os.getpid()}\\n")
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

def shy():
    """Make a model, but not in the process that reads the result."""
    if "proof" in sys.argv[0]:
        raise RuntimeError("not here")
    return small()

def broken():
    raise RuntimeError("this model is broken")

def deadly():
    """Take the process down at the first call, and never again."""
    mark = HERE / "died"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), 9)
    return small()

def always_deadly():
    os.kill(os.getpid(), 9)

def examples():
    return torch.randn(64, 16), torch.randint(0, 4, (64,))
'''


def small() -> nn.Module:
    """Make the same model here."""
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def write(folder: Path, text: str, name: str = "study.yaml") -> Path:
    """Write a recipe and the models that it may name."""
    (folder / "models.py").write_text(FACTORY)
    path = folder / name
    path.write_text(text)
    return path


def command(*words: object) -> list[str]:
    """Return the command line that runs ``bp-convert recipe``."""
    return [sys.executable, "-m", "bp_convert", "recipe", *map(str, words)]


def started(folder: Path, *words: object) -> subprocess.Popen[str]:
    """Start ``bp-convert recipe`` in a folder."""
    root = str(Path(__file__).parents[2])
    return subprocess.Popen(
        command(*words),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Tests that run in a shell's background ignore Ctrl-C, and so would this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def finished(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run ``bp-convert recipe`` in a folder."""
    process = started(folder, *words)
    out, _ = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out)
