"""The options that say how small: a budget and what it is fitted to, scores, or sizes by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bp_convert.cli.flags import option, words
from bp_convert.values import literals

GOAL = "A budget, fitted to data   --target params=0.25 --calibrate images/"
SCORE = "Scores, and text   --evaluate test.npz --metric top5 --tokenizer FOLDER"
SIZE = "Or by hand: how small, how wide   --alpha 2   or   --rank 0.25"


def rank_of(text: str | None) -> Any:
    """Read ``--rank``: a whole number of terms, or a share between 0 and 1."""
    from bp_convert.values.settings import Rank

    return _read(
        text,
        Rank,
        "neither a number of terms (1, 2, ...) nor a share of each layer's parameters between 0 "
        "and 1, such as 0.25",
    )


def alpha_of(value: float | None) -> float | None:
    """Check ``--alpha``."""
    if value is not None and not 1 <= value < 1000:
        raise typer.BadParameter(
            f"{value:g} does not widen: alpha multiplies what layers put out. Give 1 (keep the "
            "widths) or more, such as --alpha 2; to make layers smaller use --rank"
        )
    return value


def shrink_of(text: str | None) -> Any:
    """Read ``--shrink``: auto, or a number from 0 on."""
    from bp_convert.values.settings import Shrink

    return _read(text, Shrink, "neither auto nor a number from 0 to 100, such as 0.1")


def _read(text: str | None, form: Any, otherwise: str) -> Any:
    """Read a word as a type of pydantic's, which is loaded only where there is a word."""
    if text is None:
        return None
    from pydantic import TypeAdapter, ValidationError

    from bp_convert.values.marks import read_word

    try:
        return TypeAdapter(form).validate_python(read_word(text))
    except ValidationError:
        raise typer.BadParameter(f"{text!r} is {otherwise}") from None


def training_keys(incomplete: str) -> list[str]:
    """Complete the KEY= of a training setting."""
    from bp_convert.values.training import Training

    return [f"{key}=" for key in Training.model_fields if key.startswith(incomplete)]


Targets = Annotated[
    list[str] | None,
    option(
        GOAL,
        "--target WHAT=LIMIT",
        "Choose pairs and terms layer by layer for the least error within a limit: params=0.25, "
        "params=1.5M, macs=0.5, size=20MB, latency=0.5, latency=8ms, error=0.05. Repeat for "
        "several.",
        autocompletion=words("params=", "macs=", "size=", "latency=", "error="),
    ),
]
Calibrate = Annotated[
    str | None,
    option(
        GOAL,
        "--calibrate DATA",
        "Fit to what the layers see on these examples (no labels needed): an image folder, a .npy, "
        ".npz or .safetensors of inputs, a .txt, FILE.py:LOADER, or a torchvision data set's name.",
    ),
]
Count = Annotated[
    int | None,
    option(
        GOAL,
        "--examples N",
        "Examples to calibrate on; 256 to 1024 are enough. Default: 512.",
        min=1,
    ),
]
Sides = Annotated[
    literals.Sides | None,
    option(
        GOAL,
        "--sides auto|inputs|both",
        "What layers are fitted by: what they see (inputs), or also what the model makes of what "
        "they put out (both). Default: auto, whichever is better on examples held out.",
    ),
]
Spent = Annotated[
    literals.Allocation | None,
    option(
        GOAL,
        "--allocation auto|measured|uniform",
        "What a target is spent by: how far perturbing each layer moves the output, or all layers "
        "alike. Default: auto, the best of several ways on examples held out.",
    ),
]
Shrink = Annotated[
    str | None,
    option(
        GOAL,
        "--shrink auto|S",
        "How far what layers see is drawn towards the metric of the weights alone, 0 for not at "
        "all. Default: auto, by examples held out.",
        callback=shrink_of,
    ),
]
Groups = Annotated[
    bool | None,
    option(
        GOAL,
        "--groups/--no-groups",
        "Let layers that get the same inputs share a factor. Default: where that is better on "
        "examples held out.",
    ),
]
Preferred = Annotated[
    literals.Prefer | None,
    option(
        GOAL,
        "--prefer speed|balanced|quality",
        "What a target gives for time: up to 1.5 times the estimated error (speed), little "
        "(balanced), or none (quality). Default: balanced.",
    ),
]
LatencyAt = Annotated[
    list[str] | None,
    option(
        GOAL,
        "--latency-at KEY=VALUE",
        "What a target of latency is timed at: batch=8, threads=1, device=cuda. Repeat. Default: "
        "batch=1, torch's threads, the CPU.",
        autocompletion=words("batch=", "threads=", "device="),
    ),
]
Reconstructs = Annotated[
    bool | None,
    option(
        GOAL,
        "--reconstruct/--no-reconstruct",
        "Tune block after block to the source's outputs on the calibration data; some of it is "
        "held out, and nothing is kept that is worse there. Default: where it takes minutes.",
    ),
]
Epochs = Annotated[
    int | None,
    option(
        GOAL,
        "--reconstruct-epochs N",
        "Passes over the calibration data for each block. Default: up to 20, by its size.",
        min=1,
    ),
]
Method = Annotated[
    literals.Method | None,
    option(
        GOAL,
        "--method NAME",
        "auto, svd, svd-data, kron or kron-data: low rank alone or all Kronecker sums, by the "
        "weights or by the data. Default: auto.",
    ),
]
Store = Annotated[
    literals.Store | None,
    option(
        GOAL,
        "--store TYPE",
        "How weights are stored, factors and dense ones: int8, int4, int3, bf16, fp16 or fp32 (as "
        "they are). Default: as they are; for a target of size the best of each layer.",
    ),
]
Finetune = Annotated[
    list[str] | None,
    option(
        GOAL,
        "--finetune KEY=VALUE",
        "Train the result with the source as its teacher: data=FashionMNIST, epochs=3, lr=1e-3, or "
        "any setting of bp_convert.Training; folder=, resume=true, download=true. Repeat. See "
        "bp-convert finetune --help.",
        autocompletion=training_keys,
    ),
]
Evaluate = Annotated[
    str | None,
    option(
        SCORE,
        "--evaluate DATA",
        "Score before and after on these examples, none of which is calibrated on.",
    ),
]
Metric = Annotated[
    str | None,
    option(
        SCORE,
        "--metric NAME",
        "accuracy, topK, perplexity, cosine, error or FILE.py:METRIC. Default: accuracy with "
        "labels, else cosine to the source's output.",
        autocompletion=words("accuracy", "top5", "perplexity", "cosine", "error"),
    ),
]
Tokenizer = Annotated[
    Path | None,
    option(
        SCORE,
        "--tokenizer FOLDER",
        "Of a transformers tokenizer, for text. Default: the model's own folder.",
    ),
]
Alpha = Annotated[
    float | None,
    option(
        SIZE,
        "--alpha --widen A",
        "Widen what layers put out: convolutions by alpha squared, all others by alpha. "
        "(Not the alpha of LoRA, which is a scale.) Default: 1.",
        callback=alpha_of,
    ),
]
Rank = Annotated[
    str | None,
    option(
        SIZE,
        "--rank R",
        "Number of Kronecker terms, or a share of each layer's parameters such as 0.25. Default: "
        "1.",
        callback=rank_of,
    ),
]
Pairs = Annotated[
    literals.Policy | None,
    option(
        SIZE,
        "--pairs fast|paper",
        "fast: cheapest layout of about the nearest-square size. paper: nearest-square. Default: "
        "fast.",
    ),
]
Init = Annotated[
    literals.Init | None,
    option(
        SIZE,
        "--init auto|warm|mixed|random",
        "warm: fit the trained weights. mixed: draw factors, keep biases and norms. random: start "
        "afresh. Default: auto, mixed for one term at alpha above 1, else warm.",
    ),
]
