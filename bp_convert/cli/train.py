"""The command that trains a model file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from bp_convert.cli import budget_flags as b
from bp_convert.cli import flags as o
from bp_convert.cli.session import errors_shown, progress_shown, show_files
from bp_convert.values.architecture import Architecture

ON = "On what   --data FashionMNIST --validation 0.1"
HOW = "How   --epochs 3, or --minutes 5   --lr 1e-3 --set distill.logits=2 --preset paper"
RUN = "The run   --folder run, later --resume"


def finetune(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model file, converted or not, or an untrained architecture such as "
            "bp:svgg?in_channels=1 (the forms of --arch).",
        ),
    ],
    data: Annotated[str | None, o.option(ON, "--data DATA", "As --calibrate takes it.")] = None,
    validation: Annotated[
        str | None,
        o.option(
            ON,
            "--validation DATA|SHARE",
            "A source, or the share of the data that is held out. Default: 0.1.",
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        o.option(
            ON,
            "--teacher MODEL",
            "The model to learn from: the source of a converted one. Labels are not needed then.",
        ),
    ] = None,
    metric: b.Metric = None,
    download: Annotated[
        bool, o.option(ON, "--download", "Let torchvision fetch a data set.")
    ] = False,
    tokenizer: b.Tokenizer = None,
    epochs: Annotated[float | None, o.option(HOW, "--epochs N", "Default: 1.")] = None,
    steps: Annotated[int | None, o.option(HOW, "--steps N", "Instead of epochs.")] = None,
    minutes: Annotated[
        float | None, o.option(HOW, "--minutes M", "Instead of epochs: about as long as that.")
    ] = None,
    batch: Annotated[int | None, o.option(HOW, "--batch N", "Default: 64.")] = None,
    lr: Annotated[
        str | None,
        o.option(
            HOW,
            "--lr RATE",
            "auto tries some with a teacher and 200 steps or more, else takes 1e-3. Default: auto.",
        ),
    ] = None,
    preset: Annotated[
        Literal["paper", "paper-captioner"] | None,
        o.option(HOW, "--preset NAME", "paper or paper-captioner: the settings as published."),
    ] = None,
    set: Annotated[
        list[str] | None,
        o.option(
            HOW,
            "--set KEY=VALUE",
            "Any setting of bp_convert.Training, such as optimizer=AdamW, precision=bf16, "
            "ema=0.999, augment=paper, recompute=true. Repeat.",
            autocompletion=b.training_keys,
        ),
    ] = None,
    seed: o.Seed = None,
    folder: Annotated[
        Path | None,
        o.option(
            RUN, "--folder FOLDER", "Where checkpoints, log.jsonl and TensorBoard's events go."
        ),
    ] = None,
    resume: Annotated[
        bool, o.option(RUN, "--resume", "Go on from the newest checkpoint in --folder.")
    ] = False,
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
        from bp_convert.values.marks import read_word

        settings, kept = training_from(
            set or [],
            "--set",
            data=data,
            validation=None if validation is None else read_word(validation),
            epochs=epochs,
            steps=steps,
            minutes=minutes,
            batch=batch,
            lr=None if lr is None else read_word(lr),
            preset=preset,
            seed=seed,
        )
        for one in filter(None, (model, teacher)):
            if not is_architecture(one):
                check_model(Path(one))
        goal = output or Path(f"{_stem(model)}-trained.pt")
        Outputs(model=goal, force=force).check()
        first = os.environ.get("RANK", "0") == "0"  # of the processes that torchrun starts
        from bp_convert.proof import result_at

        with (
            result_at(goal if first else None, trust=trust, force=force) as file,
            progress_shown(trail, quiet=quiet or json_only or not first, left=True) as progress,
        ):
            from bp_convert.run.opening import any_model, tokenizer_in
            from bp_convert.storage import check_savable
            from bp_convert.training import finetune as train
            from bp_convert.training import leave

            opened, made_by = any_model(model, arch, trust or ())
            check_savable(opened, goal, arch=made_by, trust=trust or ())
            trained, report = train(
                opened,
                teacher=None if teacher is None else any_model(teacher, arch, trust or ())[0],
                settings=settings,
                metric=metric,
                inputs=input,
                folder=folder or kept.checkpoints,
                resume=resume or kept.resume,
                download=download or kept.download,
                tokenizer=tokenizer or tokenizer_in(model, arch),
                progress=progress,
            )
            leave()
            if file is None:
                return
            written, notes = file.write(trained, made_by)
        report = report.model_copy(update={"notes": (*report.notes, *notes)})
        if json_only:
            from bp_convert.values.base import as_json

            print(as_json(report))
            return
        from bp_convert.render import words

        for line in [] if quiet else words.trained_lines(report):
            print(line)
        print(words.trained_verdict(report))
        show_files([] if quiet else written)


def _stem(model: str) -> str:
    name = Path(model).stem if Path(model).exists() else Architecture.parse(model).name
    return name or "model"
