"""The options of the command line, each declared once, by group; those of a budget stand apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from bp_convert.values import literals

FROM = "The model file   bp-convert weights.pth --arch torchvision:resnet18"
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


def words(*known: str) -> Callable[[str], list[str]]:
    """Return what a shell completes a word from; typer knows its argument by name."""
    return lambda incomplete: [one for one in known if one.startswith(incomplete)]


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
    literals.Ways | None,
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
CastTo = Annotated[
    literals.DType | None, option(OUT, "--dtype TYPE", "Floating type of the result.")
]
Seed = Annotated[int | None, option(OUT, "--seed N", "Of random starts. Default: 0.")]
DryRun = Annotated[bool, option(PLAN, "--dry-run", "Show the plan and stop.")]
PlanOut = Annotated[Path | None, option(PLAN, "--plan-out FILE", "Write the plan as JSON.")]
PlanIn = Annotated[Path | None, option(PLAN, "--plan FILE", "Apply this plan, made before.")]
Json = Annotated[bool, option(TALK, "--json", "Print the result as JSON only.")]
Quiet = Annotated[bool, option(TALK, "--quiet -q", "Print the verdict only.")]
Verbose = Annotated[bool, option(TALK, "--verbose -v", "Show every layer, unfolded.")]
