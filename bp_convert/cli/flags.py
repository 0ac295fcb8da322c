"""The options of the command line, each declared once, by group."""

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
    "is in a file), bp-convert dense FILE -o OUT (back to plain torch layers), bp-convert demo, "
    "bp-convert schema "
    "(of --json). "
    "Exit codes: 0 done, 1 input or conversion error, 2 usage, 3 nothing converted, "
    "4 verification failed."
)


DType = Literal["float32", "bfloat16", "float16", "float64"]
_RANK: TypeAdapter[int | float] = TypeAdapter(values.Rank)


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


def words(*known: str) -> Callable[[str], list[str]]:
    """Return what a shell completes a word from; typer knows its argument by name."""
    return lambda incomplete: [one for one in known if one.startswith(incomplete)]


def training_keys(incomplete: str) -> list[str]:
    """Complete the KEY= of a training setting."""
    from bp_convert.values.training import Training

    return [f"{key}=" for key in Training.model_fields if key.startswith(incomplete)]


Model = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL", help="A .pt, .pth or .safetensors file, or a transformers folder."
    ),
]
Arch = Annotated[
    str | None,
    typer.Option(
        "--arch",
        metavar="FROM:NAME",
        autocompletion=words("torchvision:", "timm:", "transformers:", "bp:"),
        help="How to make the model where the file holds weights only: torchvision:NAME, "
        "timm:NAME, transformers:FOLDER, bp:NAME, or file.py:FACTORY.",
        rich_help_panel=FROM,
    ),
]
Trust = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar="PACKAGE",
        help="Load classes of this package or .py file too; its code runs. Repeat for more.",
        rich_help_panel=FROM,
    ),
]
AllowMissing = Annotated[
    bool,
    typer.Option(
        "--allow-missing", help="Accept weights that the file lacks.", rich_help_panel=FROM
    ),
]
Input = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="SHAPE",
        help="One example input: 3x224x224, or [NAME=][DTYPE:]SHAPE[<HIGH] with the batch axis, "
        "such as tokens=int64:1x16<30000. Repeat for several inputs.",
        rich_help_panel=FROM,
    ),
]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        metavar="WHAT=LIMIT",
        autocompletion=words("params=", "macs=", "size=", "error="),
        help="Choose pairs and terms layer by layer for the least error within a limit: "
        "params=0.25, params=1.5M, macs=0.5, size=20MB, error=0.05. Repeat for several.",
        rich_help_panel=GOAL,
    ),
]
Calibrate = Annotated[
    str | None,
    typer.Option(
        "--calibrate",
        metavar="DATA",
        help="Fit to what the layers see on these examples (no labels needed): an image folder, "
        "a .npy, .npz or .safetensors of inputs, a .txt, FILE.py:LOADER, or a torchvision data "
        "set's name.",
        rich_help_panel=GOAL,
    ),
]
Count = Annotated[
    int | None,
    typer.Option(
        "--examples",
        metavar="N",
        min=1,
        help="Examples to calibrate on; 256 to 1024 are enough. Default: 512.",
        rich_help_panel=GOAL,
    ),
]
Tokenizer = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        metavar="FOLDER",
        help="Of a transformers tokenizer, for text. Default: the model's own folder.",
        rich_help_panel=SCORE,
    ),
]
Method = Annotated[
    values.Method | None,
    typer.Option(
        "--method",
        metavar="NAME",
        help="auto, svd, svd-data, kron or kron-data: low rank alone or all Kronecker sums, "
        "by the weights or by the data. Default: auto.",
        rich_help_panel=GOAL,
    ),
]
Evaluate = Annotated[
    str | None,
    typer.Option(
        "--evaluate",
        metavar="DATA",
        help="Score before and after on these examples, none of which is calibrated on.",
        rich_help_panel=SCORE,
    ),
]
Metric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="NAME",
        autocompletion=words("accuracy", "top5", "perplexity", "cosine", "error"),
        help="accuracy, topK, perplexity, cosine, error or FILE.py:METRIC. Default: accuracy "
        "with labels, else cosine to the source's output.",
        rich_help_panel=SCORE,
    ),
]
Finetune = Annotated[
    list[str] | None,
    typer.Option(
        "--finetune",
        metavar="KEY=VALUE",
        autocompletion=training_keys,
        help="Train the result with the source as its teacher: data=FashionMNIST, epochs=3, "
        "lr=1e-3, or any setting of bp_convert.Training; folder=, resume=true, download=true. "
        "Repeat. See bp-convert finetune --help.",
        rich_help_panel=GOAL,
    ),
]
Alpha = Annotated[
    float | None,
    typer.Option(
        "--alpha",
        "--widen",
        metavar="A",
        callback=alpha_of,
        help="Widen what layers put out: Linear, Embedding and LSTM by alpha, convolutions by "
        "alpha squared. (Not the alpha of LoRA, which is a scale.) Default: 1.",
        rich_help_panel=SIZE,
    ),
]
Rank = Annotated[
    str | None,
    typer.Option(
        "--rank",
        metavar="R",
        callback=rank_of,
        help="Number of Kronecker terms, or a share of each layer's parameters such as 0.25. "
        "Default: 1.",
        rich_help_panel=SIZE,
    ),
]
Pairs = Annotated[
    values.Policy | None,
    typer.Option(
        "--pairs",
        metavar="fast|paper",
        help="fast: cheapest layout of about the nearest-square size. paper: nearest-square. "
        "Default: fast.",
        rich_help_panel=SIZE,
    ),
]
Init = Annotated[
    values.Init | None,
    typer.Option(
        "--init",
        metavar="warm|random",
        help="warm: fit the trained weights. random: start afresh. Default: warm.",
        rich_help_panel=SIZE,
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        metavar="PATTERN",
        help="Only these layers: a glob, re:REGEX, or a type. Repeat for more.",
        rich_help_panel=WHICH,
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude",
        metavar="PATTERN",
        help="Not these layers. Repeat for more.",
        rich_help_panel=WHICH,
    ),
]
ConvertHead = Annotated[
    bool,
    typer.Option(
        "--convert-head",
        help="Convert the layer that makes the output too.",
        rich_help_panel=WHICH,
    ),
]
ConvertAnyway = Annotated[
    bool,
    typer.Option(
        "--convert-anyway",
        help="Convert layers that become slower or larger, too.",
        rich_help_panel=WHICH,
    ),
]
Unchecked = Annotated[
    bool,
    typer.Option(
        "--unchecked",
        help="Write the result also where no input is known on which it could be checked.",
        rich_help_panel=WHICH,
    ),
]
SettingsFile = Annotated[
    Path | None,
    typer.Option(
        "--settings",
        metavar="FILE",
        help="A YAML file with these options and rules for single layers; flags win over it.",
        rich_help_panel=WHICH,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE",
        help="Where the result goes: .pt, or .safetensors beside its plan. "
        "Default: NAME-bp.pt in this folder.",
        rich_help_panel=OUT,
    ),
]
Force = Annotated[
    bool, typer.Option("--force", help="Replace existing files.", rich_help_panel=OUT)
]
ReportFile = Annotated[
    list[Path] | None,
    typer.Option(
        "--report",
        metavar="FILE",
        help="Write a report: .md, .html or .json. Repeat.",
        rich_help_panel=OUT,
    ),
]
Measure = Annotated[
    bool,
    typer.Option(
        "--measure", help="Time dense and converted in turn, in one run.", rich_help_panel=OUT
    ),
]
Batch = Annotated[
    list[int] | None,
    typer.Option(
        "--batch",
        metavar="N",
        min=1,
        help="Batch size to measure at; default 1 and 32. Repeat.",
        rich_help_panel=OUT,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="Where to convert and measure: cpu, cuda, cuda:1.",
        rich_help_panel=OUT,
    ),
]
CastTo = Annotated[
    DType | None,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        help="Floating type of the result.",
        rich_help_panel=OUT,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="Of random starts. Default: 0.", rich_help_panel=OUT),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Show the plan and stop.", rich_help_panel=PLAN),
]
PlanOut = Annotated[
    Path | None,
    typer.Option(
        "--plan-out", metavar="FILE", help="Write the plan as JSON.", rich_help_panel=PLAN
    ),
]
PlanIn = Annotated[
    Path | None,
    typer.Option(
        "--plan", metavar="FILE", help="Apply this plan, made before.", rich_help_panel=PLAN
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON only.", rich_help_panel=TALK)
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print the verdict only.", rich_help_panel=TALK)
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Show every layer, unfolded.", rich_help_panel=TALK),
]
