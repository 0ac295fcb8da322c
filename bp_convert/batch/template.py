"""A commented recipe for a model, to start from."""

from __future__ import annotations

import re
from pathlib import Path

from bp_convert.values.architecture import Architecture

TEMPLATE = """\
# {name}: what this recipe is for.
# Needs: {model}
# Gave: not run.
#
#     bp-convert recipe validate {file}
#     bp-convert recipe run {file} --dry-run
#     bp-convert recipe run {file} --jobs 2
#
# Paths are looked up from the folder in which the command runs. Every key that may stand here is
# in `bp-convert recipe schema`.

# The model, for all jobs.
{head}
# input: 3x224x224          # an example input, where it cannot be guessed

# Data. A folder of images, .npz or .safetensors, .txt, FILE.py:LOADER (named under `trust`), or a
# torchvision data set. Labels are needed for training and accuracy only.
# calibrate: examples.npz   # factors are fitted to it; 256 to 1024 examples are enough
# evaluate: test.npz        # scored before and after; nothing is fitted to it

# One job for each combination.
matrix:
  target: [params=0.5, params=0.25, params=0.1]
  # method: [kron, svd]
  # exclude:
  #   - {{target: params=0.5, method: svd}}

# Train each converted model, with the source as its teacher.
# finetune:
#   data: train.npz
#   epochs: 3
#   lr: 1e-3

# Rules for single layers; the first that matches wins.
# layers:
#   - {{match: classifier, keep: true}}

# Jobs that differ in more than a matrix can say stand in a list, each with its own keys:
# jobs:
#   - {{name: full, counterpart: full}}
#   - {{name: wide, alpha: 2, init: random}}

# output: runs/{name}
"""


def template(model: str, arch: str | None, output: Path | None = None) -> tuple[str, Path]:
    """Return a recipe's text, and the file that it is to stand in.

    Args:
        model: a model file or folder, or an architecture such as ``torchvision:resnet18``.
        arch: of a file that holds weights only.
        output: the file; by default the model's name with ``.yaml``, in this folder.
    """
    is_file = Path(model).exists() or ":" not in model
    text = model if is_file else Architecture.parse(model).name
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(text).stem if is_file else text).strip("-.")
    file = output or Path(f"{name or 'study'}.yaml")
    lines = [f"model: {_quoted(model)}" if is_file else f"arch: {_quoted(model)}"]
    if arch is not None:
        lines.append(f"arch: {_quoted(arch)}")
    for one in (model if not is_file else "", arch or ""):
        asked = Architecture.parse(one)
        if asked.script:
            lines.append(f"trust: {_quoted(asked.source)}   # its code runs")
    filled = TEMPLATE.format(name=file.stem, model=model, file=file, head="\n".join(lines))
    return filled, file


def _quoted(text: str) -> str:
    plain = re.fullmatch(r"[A-Za-z0-9_./][A-Za-z0-9_./?=&:+-]*", text) and ": " not in text
    return text if plain and not text.endswith(":") else f'"{text}"'.replace("\\", "\\\\")
