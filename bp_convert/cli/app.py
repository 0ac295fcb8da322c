"""The commands. Each reads its options, calls the pipeline, and prints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bp_convert._version import __version__
from bp_convert.cli import budget_flags as b
from bp_convert.cli import deploy, measuring, recipes, survey, train
from bp_convert.cli import flags as o
from bp_convert.cli.flag_checks import (
    check_data,
    check_dry_run,
    check_plan,
    check_target,
    reconstruct_of,
)
from bp_convert.cli.group import DefaultCommand, DefaultGroup
from bp_convert.cli.session import (
    DONE,
    NOTHING,
    errors_shown,
    print_result,
    progress_shown,
    typed,
)

app = typer.Typer(
    cls=DefaultGroup,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"bp-convert {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Turn a trained PyTorch model into one whose layers are bilinear projections."""


@app.command(cls=DefaultCommand, epilog=o.EPILOG)
def convert(
    ctx: typer.Context,
    model: o.Model,
    arch: o.Arch = None,
    trust: o.Trust = None,
    allow_missing: o.AllowMissing = False,
    input: o.Input = None,
    target: b.Targets = None,
    calibrate: b.Calibrate = None,
    examples: b.Count = None,
    tokenizer: b.Tokenizer = None,
    sides: b.Sides = None,
    allocation: b.Spent = None,
    shrink: b.Shrink = None,
    groups: b.Groups = None,
    prefer: b.Preferred = None,
    latency_at: b.LatencyAt = None,
    reconstruct: b.Reconstructs = None,
    reconstruct_epochs: b.Epochs = None,
    method: b.Method = None,
    store: b.Store = None,
    evaluate: b.Evaluate = None,
    metric: b.Metric = None,
    finetune: b.Finetune = None,
    alpha: b.Alpha = None,
    rank: b.Rank = None,
    pairs: b.Pairs = None,
    init: b.Init = None,
    include: o.Include = None,
    exclude: o.Exclude = None,
    convert_head: o.ConvertHead = False,
    convert_anyway: o.ConvertAnyway = False,
    ways: o.Ways = None,
    keep_parametrized: o.KeepParametrized = False,
    merge_adapters: o.MergeAdapters = False,
    unchecked: o.Unchecked = False,
    layerwise: o.Layerwise = None,
    settings: o.SettingsFile = None,
    output: o.Output = None,
    force: o.Force = False,
    report: o.ReportFile = None,
    measure: o.Measure = False,
    batch: o.Batch = None,
    device: o.Device = None,
    dtype: o.CastTo = None,
    seed: o.Seed = None,
    dry_run: o.DryRun = False,
    plan_out: o.PlanOut = None,
    plan: o.PlanIn = None,
    json_only: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
) -> None:
    """Turn a trained PyTorch model into one whose layers are bilinear projections.

    Every weight of Linear, Conv, Embedding and recurrent layers becomes a sum of Kronecker
    products of two small matrices, and the result is used like the original.
    """
    timed = measure or batch is not None
    asks = {
        "target": target, "method": method, "sides": sides, "allocation": allocation,
        "shrink": shrink, "groups": groups, "prefer": prefer, "store": store, "alpha": alpha,
        "rank": rank,
        "latency_at": measuring.latency_at(ctx, latency_at),
        "pairs": pairs, "init": init, "include": include, "exclude": exclude,
        "convert_head": convert_head, "convert_anyway": convert_anyway, "ways": ways,
        "keep_parametrized": keep_parametrized,
        "merge_adapters": merge_adapters, "seed": seed,
        "reconstruct": reconstruct_of(ctx, reconstruct, reconstruct_epochs),
    }  # fmt: skip
    check_plan(ctx, plan, **asks, input=input, settings=settings)
    check_data(
        ctx,
        calibrate=calibrate,
        examples=examples,
        tokenizer=tokenizer,
        evaluate=evaluate,
        metric=metric,
        tuned=reconstruct is True or reconstruct_epochs is not None,
    )
    check_target(ctx, target, rank, pairs)
    if dry_run:
        check_dry_run(ctx, evaluate=evaluate, finetune=finetune, timed=timed)
    with errors_shown() as trail:
        from bp_convert.cli.reading import settings_from, training_for
        from bp_convert.run.streamed import default_output
        from bp_convert.run.written import check_model
        from bp_convert.values.recipe import BATCHES, EXAMPLES, Job

        training, outputs = training_for(finetune, calibrate)
        job = Job(
            name="convert",
            model=str(model),
            arch=arch,
            trust=tuple(trust or ()),
            allow_missing=allow_missing,
            tokenizer=None if tokenizer is None else str(tokenizer),
            settings=settings_from(settings, **asks, inputs=input),
            calibrate=calibrate,
            examples=examples or EXAMPLES,
            evaluate=evaluate,
            metric=metric,
            finetune=training,
            teacher="auto" if training is None else "source",
            plan=None if plan is None else str(plan),
            device=device,
            dtype=dtype,
            measure=tuple(batch or BATCHES) if timed else (),
            unchecked=unchecked,
            layerwise=layerwise,
        )
        check_model(model)
        outputs = replace(
            outputs,
            model=None if dry_run else output or default_output(job),
            plan=plan_out,
            reports=tuple(report or ()),
            force=force,
            command=typed(),
        )
        outputs.check()
        from bp_convert.run.job import run

        with progress_shown(trail, quiet=quiet or json_only, left=training is not None) as progress:
            done = run(job, outputs, dry=dry_run, progress=progress)
        assert done.report is not None
        print_result(
            done.report, json_only=json_only, quiet=quiet, verbose=verbose, files=done.files
        )
    raise typer.Exit(DONE if done.changed or dry_run else NOTHING)


@app.command()
def dense(
    model: Annotated[Path, typer.Argument(help="A file that bp-convert wrote.")],
    output: Annotated[Path, o.option(None, "-o --output", "Where the plain model goes.")],
    factored: Annotated[
        bool,
        o.option(None, "--factored", "Make two plain layers of each of low rank: small as it is."),
    ] = False,
    arch: o.Arch = None,
    trust: o.Trust = None,
    force: o.Force = False,
) -> None:
    """Turn a converted model back into plain torch layers of the same weights."""
    with errors_shown():
        from bp_convert.files.atomic import check_folder, check_output, is_folder
        from bp_convert.run.written import check_model

        check_model(model)
        (check_folder if is_folder(output) else check_output)(output, force=force)
        from bp_convert.proof import result_at

        with result_at(output, trust=trust, force=force) as file:
            from bp_convert import storage

            small = storage.load(model, arch=arch, trust=trust or ())
            plain = storage.to_dense(small, factored=factored)
            assert file is not None
            _, notes = file.write(plain)
        count = sum(p.numel() for p in plain.parameters())
        words = "".join(f"; {note}" for note in notes)
        print(
            f"{output}: {type(plain).__name__} in plain torch layers, {count:,} parameters{words}"
        )


@app.command()
def demo(
    folder: Annotated[Path, typer.Option(help="Where the demo's files go.")] = Path("demo-out"),
) -> None:
    """Convert two torchvision models, reload the results in a new process, and run them."""
    with errors_shown():
        from bp_convert.demo import run

        run(folder)


app.command()(survey.inspect)
app.command()(train.finetune)
app.command()(deploy.export)
app.command()(survey.probe)
app.command()(survey.sweep)
app.command()(measuring.tune)
app.add_typer(recipes.app, name="recipe")


@app.command()
def schema() -> None:
    """Print the JSON schema of what --json prints."""
    from bp_convert.values.report import Report

    print(json.dumps(Report.model_json_schema(mode="serialization"), indent=1))
