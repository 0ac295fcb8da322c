"""The command that trains a model file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bp_convert.cli import options as o
from bp_convert.cli.given import stands_there
from bp_convert.cli.session import errors_shown, progress_shown, show_files
from bp_convert.values.text import as_json

if TYPE_CHECKING:
    from torch import nn

    from bp_convert.values.training import Trained

ON = "On what   --data FashionMNIST --validation 0.1"
HOW = "How   --epochs 3 --lr 1e-3 --set distill.logits=2 --preset paper"
RUN = "The run   --folder run, later --resume"

ModelOrSpec = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A model file, converted or not, or an untrained architecture such as "
        "bp:svgg?in_channels=1 (the forms of --arch).",
    ),
]
DataSource = Annotated[
    str | None,
    typer.Option("--data", metavar="DATA", help="As --calibrate takes it.", rich_help_panel=ON),
]
Validation = Annotated[
    str | None,
    typer.Option(
        "--validation",
        metavar="DATA|SHARE",
        help="A source, or the share of the data that is held out. Default: 0.1.",
        rich_help_panel=ON,
    ),
]
Teacher = Annotated[
    str | None,
    typer.Option(
        "--teacher",
        metavar="MODEL",
        help="The model to learn from: the source of a converted one. Labels are not needed then.",
        rich_help_panel=ON,
    ),
]
Metric = Annotated[
    str | None,
    typer.Option(
        "--metric", metavar="NAME", help="Scored on the validation data.", rich_help_panel=ON
    ),
]
Download = Annotated[
    bool,
    typer.Option("--download", help="Let torchvision fetch a data set.", rich_help_panel=ON),
]
Epochs = Annotated[
    float | None, typer.Option("--epochs", metavar="N", help="Default: 1.", rich_help_panel=HOW)
]
Trail = Annotated[
    int | None,
    typer.Option("--steps", metavar="N", help="Instead of epochs.", rich_help_panel=HOW),
]
BatchSize = Annotated[
    int | None, typer.Option("--batch", metavar="N", help="Default: 64.", rich_help_panel=HOW)
]
Rate = Annotated[
    float | None, typer.Option("--lr", metavar="RATE", help="Default: 1e-3.", rich_help_panel=HOW)
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="NAME",
        help="paper or paper-captioner: the settings as published.",
        rich_help_panel=HOW,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any setting of bp_convert.Training, such as optimizer=AdamW, precision=bf16, "
        "ema=0.999, augment=paper, recompute=true. Repeat.",
        rich_help_panel=HOW,
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        metavar="FOLDER",
        help="Where checkpoints, log.jsonl and TensorBoard's events go.",
        rich_help_panel=RUN,
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Go on from the newest checkpoint in --folder.", rich_help_panel=RUN
    ),
]


def finetune(
    ctx: typer.Context,
    model: ModelOrSpec,
    data: DataSource = None,
    validation: Validation = None,
    teacher: Teacher = None,
    metric: Metric = None,
    download: Download = False,
    tokenizer: o.Tokenizer = None,
    epochs: Epochs = None,
    steps: Trail = None,
    batch: BatchSize = None,
    lr: Rate = None,
    preset: Preset = None,
    set: Set = None,
    seed: o.Seed = 0,
    folder: Folder = None,
    resume: Resume = False,
    arch: o.Arch = None,
    trust: o.Trust = None,
    input: o.Input = None,
    output: o.Output = None,
    force: o.Force = False,
    json_only: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Train a model: a converted one by its source, any one by labels.

    Several processes: torchrun --nproc_per_node 2 -m bp_convert finetune ...
    """
    with errors_shown() as trail:
        from bp_convert.cli.training import tokenizer_beside, training_from
        from bp_convert.files.atomic import check_output
        from bp_convert.files.converted import OUTPUT_SUFFIXES
        from bp_convert.proof.result import result_at

        named = {
            "data": data, "validation": _share(validation), "epochs": epochs, "steps": steps,
            "batch": batch, "lr": lr, "preset": preset,
            "seed": seed if stands_there(ctx, "seed") else None,
        }  # fmt: skip
        flags = {key: value for key, value in named.items() if value is not None}
        settings, beside = training_from(set or [], flags, "--set")
        goal = output or Path(f"{_stem(model)}-trained.pt")
        check_output(goal, force=force, suffixes=OUTPUT_SUFFIXES)
        first = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun starts
        with (
            result_at(goal, trust=trust, force=force, wanted=first) as file,
            progress_shown(trail, quiet=quiet or json_only or not first, left=True) as progress,
        ):
            from bp_convert.training import finetune as train
            from bp_convert.training import leave

            opened, made_by = _opened(model, arch, trust)
            if file is not None:
                file.check(opened, made_by)
            trained, report = train(
                opened,
                teacher=None if teacher is None else _opened(teacher, arch, trust)[0],
                settings=settings,
                metric=metric,
                inputs=input,
                folder=folder or beside.get("folder"),
                resume=resume or bool(beside.get("resume")),
                download=download or bool(beside.get("download")),
                tokenizer=tokenizer_beside(model, arch, tokenizer),
                progress=progress,
            )
            leave()
            if file is None:
                return
            written, notes = file.write(trained, made_by)
        report = report.model_copy(update={"notes": (*report.notes, *notes)})
        if json_only:
            print(as_json(report.model_dump(mode="json")))
            return
        _print(report, quiet=quiet)
        show_files([] if quiet else written)


def _opened(model: str, arch: str | None, trust: list[str] | None) -> tuple[nn.Module, str | None]:
    """Open a converted file, any other model file, or make an untrained model.

    Returns:
        The model, and how its source's class is made, where a file should say so.
    """
    from bp_convert import pipeline
    from bp_convert.files import arch_factory, read_converted

    path = Path(model)
    if not path.exists() and ":" in model:
        return arch_factory(model, trust=trust or (), typed=True)(), None
    if path.exists() and not path.is_dir() and pipeline.is_converted(path):
        found = read_converted(path, trust=trust or ()).arch if arch is None else arch
        make = None if arch is None else arch_factory(arch, trust=trust or (), typed=True)
        return pipeline.load(path, model=make, trust=trust or ()), found
    loaded = pipeline.open_model(path, arch=arch, trust=trust or ())
    return loaded.model, loaded.arch


def _share(text: str | None) -> str | float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _stem(model: str) -> str:
    name = Path(model).stem if Path(model).exists() else model.partition("?")[0].rpartition(":")[2]
    return name or "model"


def _print(report: Trained, *, quiet: bool) -> None:
    from bp_convert.render import training as words

    if not quiet:
        for line in words.lines(report):
            print(line)
    print(words.verdict(report))
