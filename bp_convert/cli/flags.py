"""The options of the command line, each declared once, by group; and which do not go together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import TypeAdapter, ValidationError

from bp_convert.values import settings as values
from bp_convert.values.marks import read_word

FROM = "The model file   bp-convert weights.pth --arch torchvision:resnet18"
GOAL = "A budget, fitted to data   --target params=0.25 --calibrate images/"
SCORE = "Scores, and text   --evaluate test.npz --metric top5 --tokenizer FOLDER"
SIZE = "Or by hand: how small, how wide   --alpha 2   or   --rank 0.25"
WHICH = "Which layers   --include 'layer4.*' --exclude layer4.0.conv1"
OUT = "What comes out   -o small.pt --report small.html --measure"
PLAN = "Plan first   --dry-run --plan-out plan.json, edit it, then --plan plan.json"
TALK = "How it talks   --quiet   or   --json"

EPILOG = (
    "Other commands: bp-convert probe MODEL (how far each layer can be compressed), bp-convert "
    "sweep MODEL (several targets in one table), bp-convert finetune MODEL (train a model or a "
    "result), bp-convert recipe run FILE (batches of conversions), bp-convert inspect MODEL (what "
    "is in a file), bp-convert dense FILE -o OUT (back to plain torch layers), bp-convert export "
    "FILE --to onnx -o OUT (for another runtime), bp-convert tune (measure how fast layers run "
    "here), bp-convert demo, bp-convert schema (of --json). "
    "Exit codes: 0 done, 1 input or conversion error, 2 usage, 3 nothing converted, "
    "4 verification failed."
)


DType = Literal["float32", "bfloat16", "float16", "float64"]
_RANK: TypeAdapter[int | float] = TypeAdapter(values.Rank)
_SHRINK: TypeAdapter[str | float] = TypeAdapter(values.Shrink)


def rank_of(text: str | None) -> Any:
    """Read ``--rank``: a whole number of terms, or a share between 0 and 1."""
    try:
        return None if text is None else _RANK.validate_python(read_word(text))
    except ValidationError:
        raise typer.BadParameter(
            f"{text!r} is neither a number of terms (1, 2, ...) nor a share of each layer's "
            "parameters between 0 and 1, such as 0.25"
        ) from None


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
    try:
        return None if text is None else _SHRINK.validate_python(read_word(text))
    except ValidationError:
        raise typer.BadParameter(
            f"{text!r} is neither auto nor a number from 0 to 100, such as 0.1"
        ) from None


def words(*known: str) -> Callable[[str], list[str]]:
    """Return what a shell completes a word from; typer knows its argument by name."""
    return lambda incomplete: [one for one in known if one.startswith(incomplete)]


def training_keys(incomplete: str) -> list[str]:
    """Complete the KEY= of a training setting."""
    from bp_convert.values.training import Training

    return [f"{key}=" for key in Training.model_fields if key.startswith(incomplete)]


def option(panel: str | None, form: str, help: str, **more: Any) -> Any:
    """Declare an option.

    Args:
        panel: the heading that it stands under.
        form: how it is typed: its names and, where it is no switch, what it takes.
    """
    names = [word for word in form.split() if word.startswith("-")]
    takes = next((word for word in form.split() if word not in names), None)
    return typer.Option(*names, metavar=takes, help=help, rich_help_panel=panel, **more)


Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", help="A .pt, .pth or .safetensors file, or a transformers folder."
    ),
]
Arch = Annotated[
    str | None,
    option(
        FROM,
        "--arch FROM:NAME",
        "How to make the model where the file holds weights only: torchvision:NAME, timm:NAME, "
        "transformers:FOLDER, bp:NAME, or file.py:FACTORY.",
        autocompletion=words("torchvision:", "timm:", "transformers:", "bp:"),
    ),
]
Trust = Annotated[
    list[str] | None,
    option(
        FROM,
        "--trust PACKAGE",
        "Load classes of this package or .py file too; its code runs. Repeat for more.",
    ),
]
AllowMissing = Annotated[
    bool, option(FROM, "--allow-missing", "Accept weights that the file lacks.")
]
Input = Annotated[
    list[str] | None,
    option(
        FROM,
        "--input SHAPE",
        "One example input: 3x224x224, or [NAME=][DTYPE:]SHAPE[<HIGH] with the batch axis, such as "
        "tokens=int64:1x16<30000. Repeat for several inputs.",
    ),
]
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
Tokenizer = Annotated[
    Path | None,
    option(
        SCORE,
        "--tokenizer FOLDER",
        "Of a transformers tokenizer, for text. Default: the model's own folder.",
    ),
]
Sides = Annotated[
    values.Sides | None,
    option(
        GOAL,
        "--sides auto|inputs|both",
        "What layers are fitted by: what they see (inputs), or also what the model makes of what "
        "they put out (both). Default: auto, whichever is better on examples held out.",
    ),
]
Spent = Annotated[
    values.Allocation | None,
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
    values.Prefer | None,
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
    values.Method | None,
    option(
        GOAL,
        "--method NAME",
        "auto, svd, svd-data, kron or kron-data: low rank alone or all Kronecker sums, by the "
        "weights or by the data. Default: auto.",
    ),
]
Store = Annotated[
    values.Store | None,
    option(
        GOAL,
        "--store TYPE",
        "How weights are stored, factors and dense ones: int8, int4, int3, bf16, fp16 or fp32 (as "
        "they are). Default: as they are; for a target of size the best of each layer.",
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
    values.Policy | None,
    option(
        SIZE,
        "--pairs fast|paper",
        "fast: cheapest layout of about the nearest-square size. paper: nearest-square. Default: "
        "fast.",
    ),
]
Init = Annotated[
    values.Init | None,
    option(
        SIZE,
        "--init auto|warm|mixed|random",
        "warm: fit the trained weights. mixed: draw factors, keep biases and norms. random: start "
        "afresh. Default: auto, mixed for one term at alpha above 1, else warm.",
    ),
]
Include = Annotated[
    list[str] | None,
    option(
        WHICH,
        "--include PATTERN",
        "Only these layers: a glob, re:REGEX, or a type. Repeat for more.",
    ),
]
Exclude = Annotated[
    list[str] | None, option(WHICH, "--exclude PATTERN", "Not these layers. Repeat for more.")
]
ConvertHead = Annotated[
    bool,
    option(WHICH, "--convert-head", "Convert every layer that makes the output, small ones too."),
]
ConvertAnyway = Annotated[
    bool, option(WHICH, "--convert-anyway", "Convert layers that become slower or larger, too.")
]
Ways = Annotated[
    values.Ways | None,
    option(
        WHICH,
        "--ways auto|factored|expanded",
        "How replaced layers run: on their factors, or expanded, on the dense weight, built at the "
        "first call (dense speed and memory, small file). Default: auto, the faster by prediction.",
    ),
]
KeepParametrized = Annotated[
    bool,
    option(
        WHICH,
        "--keep-parametrized",
        "Leave layers that compute their weight (weight norm, spectral norm, pruning masks, "
        "standardised weights); else the weight in effect is taken.",
    ),
]
MergeAdapters = Annotated[
    bool,
    option(WHICH, "--merge-adapters", "Merge LoRA adapters into their layers first."),
]
Unchecked = Annotated[
    bool,
    option(
        WHICH,
        "--unchecked",
        "Write the result also where no input is known on which it could be checked.",
    ),
]
Layerwise = Annotated[
    bool | None,
    option(
        WHICH,
        "--layerwise/--in-memory",
        "Convert a transformers folder layer by layer, from disk to disk, in bounded memory; "
        "killed, it goes on when run again. Default: where it is large for the free memory.",
    ),
]
SettingsFile = Annotated[
    Path | None,
    option(
        WHICH,
        "--settings FILE",
        "A YAML file with these options and rules for single layers; flags win over it.",
    ),
]
Output = Annotated[
    Path | None,
    option(
        OUT,
        "-o --output FILE",
        "Where the result goes: .pt, .safetensors beside its plan, or DIR/ for a transformers "
        "folder. Default: NAME-bp.pt in this folder.",
    ),
]
Force = Annotated[bool, option(OUT, "--force", "Replace existing files.")]
ReportFile = Annotated[
    list[Path] | None, option(OUT, "--report FILE", "Write a report: .md, .html or .json. Repeat.")
]
Measure = Annotated[bool, option(OUT, "--measure", "Time dense and converted in turn, in one run.")]
Batch = Annotated[
    list[int] | None,
    option(OUT, "--batch N", "Batch size to measure at; default 1 and 32. Repeat.", min=1),
]
Device = Annotated[
    str | None, option(OUT, "--device NAME", "Where to convert and measure: cpu, cuda, cuda:1.")
]
CastTo = Annotated[DType | None, option(OUT, "--dtype TYPE", "Floating type of the result.")]
Seed = Annotated[int | None, option(OUT, "--seed N", "Of random starts. Default: 0.")]
DryRun = Annotated[bool, option(PLAN, "--dry-run", "Show the plan and stop.")]
PlanOut = Annotated[Path | None, option(PLAN, "--plan-out FILE", "Write the plan as JSON.")]
PlanIn = Annotated[Path | None, option(PLAN, "--plan FILE", "Apply this plan, made before.")]
Json = Annotated[bool, option(TALK, "--json", "Print the result as JSON only.")]
Quiet = Annotated[bool, option(TALK, "--quiet -q", "Print the verdict only.")]
Verbose = Annotated[bool, option(TALK, "--verbose -v", "Show every layer, unfolded.")]


def check_data(
    ctx: typer.Context,
    *,
    calibrate: str | None,
    examples: int | None,
    tokenizer: Path | None,
    evaluate: str | None = None,
    metric: str | None = None,
    tuned: bool = False,
) -> None:
    """Refuse options about data where there is none."""
    if calibrate is None:
        alone = {
            "examples": examples,
            "tokenizer": None if evaluate else tokenizer,
            "reconstruct": tuned or None,
        }
        for name in (name for name, value in alone.items() if value is not None):
            raise typer.BadParameter(
                f"--{name} is about data, and there is none. Add --calibrate", ctx=ctx
            )
    if metric is not None and evaluate is None:
        raise typer.BadParameter("--metric needs data to score on. Add --evaluate", ctx=ctx)


def reconstruct_of(ctx: typer.Context, wanted: bool | None, epochs: int | None) -> Any:
    """Return the setting that ``--reconstruct`` and ``--reconstruct-epochs`` stand for; None where
    neither was given."""
    if epochs is None:
        return None if wanted is None else "on" if wanted else "off"
    if wanted is False:
        raise typer.BadParameter(
            "--no-reconstruct tunes nothing, for no number of epochs. Leave one of the two out",
            ctx=ctx,
        )
    return {"epochs": epochs}


def check_plan(ctx: typer.Context, plan: Path | None, **asks: object) -> None:
    """Refuse to make a plan where one is given.

    Args:
        asks: options that are for making one; None and False were not given.
    """
    given = [name for name, value in asks.items() if value is not None and value is not False]
    if plan is not None and given:
        flag = "--" + given[0].replace("_", "-")
        raise typer.BadParameter(
            f"{flag} is for making a plan, and --plan applies one that is made. Leave {flag} "
            "out, or make another plan with --plan-out",
            ctx=ctx,
        )


def check_target(ctx: typer.Context, target: object, rank: object, pairs: object) -> None:
    """Refuse to set what a target chooses."""
    if target is not None and (rank is not None or pairs is not None):
        raise typer.BadParameter(
            "--target chooses pairs and terms, --rank and --pairs set them. Give one or the "
            "other; a settings file can set them for single layers",
            ctx=ctx,
        )


def check_dry_run(ctx: typer.Context, *, evaluate: object, finetune: object, timed: bool) -> None:
    """Refuse what a dry run makes nothing for."""
    for given, why in (
        (evaluate, "makes nothing that --evaluate could score"),
        (finetune, "makes nothing that --finetune could train"),
        (timed, "converts nothing that --measure could time"),
    ):
        if given:
            raise typer.BadParameter(f"a dry run {why}. Leave one of the two out", ctx=ctx)
