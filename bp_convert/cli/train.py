"""The command that trains a model file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bp_convert.cli import flags as o
from bp_convert.cli.session import errors_shown, progress_shown, show_files
from bp_convert.values.marks import read_word
from bp_convert.values.text import as_json

if TYPE_CHECKING:
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
Download = Annotated[
    bool,
    typer.Option("--download", help="Let torchvision fetch a data set.", rich_help_panel=ON),
]
Epochs = Annotated[
    float | None, typer.Option("--epochs", metavar="N", help="Default: 1.", rich_help_panel=HOW)
]
Steps = Annotated[
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
    Literal["paper", "paper-captioner"] | None,
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
        autocompletion=o.training_keys,
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
    model: ModelOrSpec,
    data: DataSource = None,
    validation: Validation = None,
    teacher: Teacher = None,
    metric: o.Metric = None,
    download: Download = False,
    tokenizer: o.Tokenizer = None,
    epochs: Epochs = None,
    steps: Steps = None,
    batch: BatchSize = None,
    lr: Rate = None,
    preset: Preset = None,
    set: Set = None,
    seed: o.Seed = None,
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
        from bp_convert.cli.reading import training_from
        from bp_convert.run.written import Outputs, check_model, is_architecture

        settings, beside = training_from(
            set or [],
            "--set",
            data=data,
            validation=None if validation is None else read_word(validation),
            epochs=epochs,
            steps=steps,
            batch=batch,
            lr=lr,
            preset=preset,
            seed=seed,
        )
        for one in filter(None, (model, teacher)):
            if not is_architecture(one):
                check_model(Path(one))
        goal = output or Path(f"{_stem(model)}-trained.pt")
        Outputs(model=goal, force=force).check()
        first = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun starts
        from bp_convert.proof.result import result_at

        with (
            result_at(goal if first else None, trust=trust, force=force) as file,
            progress_shown(trail, quiet=quiet or json_only or not first, left=True) as progress,
        ):
            from bp_convert.files import check_writable
            from bp_convert.run.opening import any_model, tokenizer_in
            from bp_convert.training import finetune as train
            from bp_convert.training import leave

            opened, made_by = any_model(model, arch, trust or ())
            check_writable(opened, goal, arch=made_by, trust=trust or ())
            trained, report = train(
                opened,
                teacher=None if teacher is None else any_model(teacher, arch, trust or ())[0],
                settings=settings,
                metric=metric,
                inputs=input,
                folder=folder or beside.folder,
                resume=resume or beside.resume,
                download=download or beside.download,
                tokenizer=tokenizer or tokenizer_in(model, arch),
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


def _stem(model: str) -> str:
    name = Path(model).stem if Path(model).exists() else model.partition("?")[0].rpartition(":")[2]
    return name or "model"


def _print(report: Trained, *, quiet: bool) -> None:
    from bp_convert.render import words

    if not quiet:
        for line in words.trained_lines(report):
            print(line)
    print(words.trained_verdict(report))
