"""The commands. Each reads its options, calls the pipeline, and prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bp_convert._version import __version__
from bp_convert.cli import finetune as tuning
from bp_convert.cli import inspect as looking
from bp_convert.cli import options as o
from bp_convert.cli import recipe, studies
from bp_convert.cli.group import DefaultCommand, DefaultGroup
from bp_convert.cli.session import (
    DONE,
    NOTHING,
    errors_shown,
    print_report,
    progress_shown,
    show_files,
)
from bp_convert.cli.together import check_data, check_dry_run, check_plan, check_target
from bp_convert.errors import VerificationError

if TYPE_CHECKING:
    from bp_convert.values.plan import Plan

app = typer.Typer(
    cls=DefaultGroup,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
EXAMPLES = 512  # that are calibrated on
UNTIMED = "nothing was timed: no example input is known (--input)"


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
    target: o.Targets = None,
    calibrate: o.Calibrate = None,
    examples: o.Count = None,
    tokenizer: o.Tokenizer = None,
    method: o.Method = None,
    evaluate: o.Evaluate = None,
    metric: o.Metric = None,
    finetune: o.Finetune = None,
    alpha: o.Alpha = None,
    rank: o.Rank = None,
    pairs: o.Pairs = None,
    init: o.Init = None,
    include: o.Include = None,
    exclude: o.Exclude = None,
    convert_head: o.ConvertHead = False,
    convert_anyway: o.ConvertAnyway = False,
    unchecked: o.Unchecked = False,
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

    Every Linear, Conv, Embedding and LSTM weight becomes a sum of Kronecker products of two
    small matrices, and the result is used like the original.
    """
    timed = measure or batch is not None
    asks = {
        "target": target, "method": method, "alpha": alpha, "rank": rank, "pairs": pairs,
        "init": init, "include": include, "exclude": exclude, "convert_head": convert_head,
        "convert_anyway": convert_anyway, "seed": seed,
    }  # fmt: skip
    check_plan(ctx, plan, **asks, input=input, settings=settings)
    check_data(
        ctx,
        calibrate=calibrate,
        examples=examples,
        tokenizer=tokenizer,
        evaluate=evaluate,
        metric=metric,
    )
    check_target(ctx, target, rank, pairs)
    if dry_run:
        check_dry_run(ctx, evaluate=evaluate, finetune=finetune, timed=timed)
    with errors_shown() as trail:
        from bp_convert.cli.outputs import check_model, check_outputs, write_reports
        from bp_convert.cli.reading import settings_from
        from bp_convert.cli.retrain import trainer_from

        asked = settings_from(settings, **asks, inputs=input)
        trainer = trainer_from(finetune, calibrate)
        goal, reports = output or Path(f"{model.stem}-bp.pt"), report or []
        check_model(model)
        check_outputs(None if dry_run else goal, reports=reports, plan_out=plan_out, force=force)
        from bp_convert.cli.data import open_with_data
        from bp_convert.proof.result import result_at

        with (
            result_at(goal, trust=trust, force=force, wanted=not dry_run) as file,
            progress_shown(trail, quiet=quiet or json_only, left=trainer is not None) as progress,
        ):
            from bp_convert import pipeline

            trail.stage = "reading the model"
            made = pipeline.read_plan(plan) if plan is not None else None
            loaded, data = open_with_data(
                model,
                arch=arch,
                trust=trust,
                allow_missing=allow_missing,
                settings=asked if made is None else made.settings,
                calibrate=calibrate,
                evaluate=None if dry_run else evaluate,
                count=examples or EXAMPLES,
                tokenizer=tokenizer,
                training=None if trainer is None else trainer.settings,
                download=trainer is not None and bool(trainer.beside.get("download")),
                inputs=() if made is None else made.inputs,
                device=device,
            )
            source = data.model
            if file is not None:
                file.check(source, loaded.arch)
            trail.stage = "reading the examples"
            given = data.calibration
            trail.stage = "planning"
            if made is None:
                made = pipeline.plan(source, asked, calibrate=given, progress=progress)
            written = [pipeline.write_plan(made, plan_out, force)] if plan_out else []
            done = bool(made.converted or made.resizes)
            if done and not (dry_run or unchecked or made.inputs or given):
                raise _uncheckable(made)
            if dry_run:
                result = pipeline.report_of(made, source=loaded.source)
            else:
                held = data.evaluation
                trail.stage = "converting"
                small, result = pipeline.convert(
                    source,
                    plan=made,
                    calibrate=given,
                    evaluate=held,
                    metric=metric,
                    device=device,
                    dtype=dtype,
                    measure=(batch or True) if timed else (),
                    progress=progress,
                    source=loaded.source,
                )
                if trainer is not None and done:
                    trail.stage = "training"
                    small, result = trainer.run(small, source, result, data, metric, progress)
            trail.stage = "writing"
            untimed = [UNTIMED] if timed and not made.inputs else []
            remarks: list[str] = []
            if file is not None and done:
                files, remarks = file.write(small, loaded.arch, model)
                written += files
            notes = (*loaded.notes, *result.notes, *untimed, *remarks)
            result = result.model_copy(update={"notes": notes})
        written += write_reports(result, reports, force=force)
        print_report(result, json_only=json_only, quiet=quiet, verbose=verbose)
        show_files([] if quiet or json_only else written)
    raise typer.Exit(DONE if done or dry_run else NOTHING)


@app.command()
def dense(
    model: Annotated[Path, typer.Argument(help="A file that bp-convert wrote.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where the plain model goes.")],
    arch: o.Arch = None,
    trust: o.Trust = None,
    force: o.Force = False,
) -> None:
    """Turn a converted model back into plain torch layers of the same weights."""
    with errors_shown():
        from bp_convert.cli.outputs import check_model
        from bp_convert.files.atomic import check_output

        check_model(model)
        check_output(output, force=force)
        from bp_convert.proof.result import result_at

        with result_at(output, trust=trust, force=force) as file:
            from bp_convert import pipeline

            plain = pipeline.to_dense(pipeline.load(model, arch=arch, trust=trust or ()))
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


app.command()(looking.inspect)
app.command()(tuning.finetune)
app.command()(studies.probe)
app.command()(studies.sweep)
app.add_typer(recipe.app, name="recipe")


@app.command()
def schema() -> None:
    """Print the JSON schema of what --json prints."""
    from bp_convert.values.report import Report

    print(json.dumps(Report.model_json_schema(mode="serialization"), indent=1))


def _uncheckable(plan: Plan) -> VerificationError:
    return VerificationError(
        where=plan.model,
        found="no input is known on which it runs, so that nothing could be checked",
        allowed="a conversion that was run beside its source",
        fix="describe an input with --input, give examples with --calibrate, or take the result "
        "as it is with --unchecked",
    )
