"""The commands that look before a model is converted: probe and sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bp_convert.cli import options as o
from bp_convert.cli.session import errors_shown, progress_shown, show, show_files
from bp_convert.cli.together import check_data
from bp_convert.values.text import as_json

Error = Annotated[
    float,
    typer.Option("--error", metavar="E", help="Relative error at which savings are counted."),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FOLDER",
        help="Write each point's model there, named by its target.",
        rich_help_panel=o.OUT,
    ),
]
NoSvd = Annotated[
    bool, typer.Option("--no-svd", help="Leave truncated SVD out.", rich_help_panel=o.GOAL)
]


def probe(
    ctx: typer.Context,
    model: o.Model,
    arch: o.Arch = None,
    trust: o.Trust = None,
    allow_missing: o.AllowMissing = False,
    input: o.Input = None,
    calibrate: o.Calibrate = None,
    examples: o.Count = None,
    tokenizer: o.Tokenizer = None,
    error: Error = 0.3,
    include: o.Include = None,
    exclude: o.Exclude = None,
    report: o.ReportFile = None,
    force: o.Force = False,
    seed: o.Seed = None,
    json_only: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
) -> None:
    """Show how far each layer can be compressed, the largest saving first."""
    check_data(ctx, calibrate=calibrate, examples=examples, tokenizer=tokenizer)
    if not 0 < error < 1:
        raise typer.BadParameter(f"{error:g} is no relative error. Give one between 0 and 1")
    with errors_shown() as trail:
        from bp_convert.cli.outputs import check_model, check_outputs, write_reports
        from bp_convert.cli.reading import settings_from

        reports = report or []
        check_model(model)
        check_outputs(None, reports=reports, plan_out=None, force=force)
        asked = settings_from(include=include, exclude=exclude, inputs=input, seed=seed)
        from bp_convert import studies
        from bp_convert.cli.data import open_with_data
        from bp_convert.render import study

        with progress_shown(trail, quiet=quiet or json_only) as progress:
            loaded, data = open_with_data(
                model,
                arch=arch,
                trust=trust,
                allow_missing=allow_missing,
                settings=asked,
                calibrate=calibrate,
                count=examples or 512,
                tokenizer=tokenizer,
            )
            found = studies.probe(
                loaded.model,
                asked,
                calibrate=data.calibration,
                error=error,
                source=loaded.source,
                progress=progress,
            )
        write_reports(found, reports, force=force)
        if json_only:
            print(_as_json(found), end="")
        elif quiet:
            print(study.probe_verdict(found))
        else:
            show(study.shown_probe(found, every=verbose))
            show_files(reports)


def sweep(
    ctx: typer.Context,
    model: o.Model,
    target: o.Targets = None,
    arch: o.Arch = None,
    trust: o.Trust = None,
    allow_missing: o.AllowMissing = False,
    input: o.Input = None,
    calibrate: o.Calibrate = None,
    examples: o.Count = None,
    tokenizer: o.Tokenizer = None,
    method: o.Method = None,
    evaluate: o.Evaluate = None,
    metric: o.Metric = None,
    no_svd: NoSvd = False,
    include: o.Include = None,
    exclude: o.Exclude = None,
    convert_anyway: o.ConvertAnyway = False,
    output: Folder = None,
    report: o.ReportFile = None,
    force: o.Force = False,
    seed: o.Seed = None,
    json_only: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Convert to several targets, and compare size and quality; truncated SVD stands beside.

    Give the targets as --target params=0.5,0.25,0.1 or one by one.
    """
    check_data(
        ctx,
        calibrate=calibrate,
        examples=examples,
        tokenizer=tokenizer,
        evaluate=evaluate,
        metric=metric,
    )
    with errors_shown() as trail:
        from bp_convert.cli.outputs import check_model, check_outputs, write_reports
        from bp_convert.cli.reading import settings_from, several

        check_model(model)
        targets = several(target or ["params=0.5,0.25,0.1"])
        files = (
            {one: output / f"{model.stem}-{str(one).replace('=', '-')}.pt" for one in targets}
            if output is not None
            else {}
        )
        reports = report or []
        check_outputs(None, reports=reports, plan_out=None, force=force)
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
        for path in files.values():
            check_outputs(path, reports=(), plan_out=None, force=force)
        asked = settings_from(
            include=include,
            exclude=exclude,
            inputs=input,
            seed=seed,
            method=method,
            convert_anyway=convert_anyway,
        )
        from bp_convert import studies
        from bp_convert.cli.data import open_with_data
        from bp_convert.files import check_writable
        from bp_convert.proof.result import result_at
        from bp_convert.render import study

        with progress_shown(trail, quiet=quiet or json_only) as progress:
            loaded, data = open_with_data(
                model,
                arch=arch,
                trust=trust,
                allow_missing=allow_missing,
                settings=asked,
                calibrate=calibrate,
                evaluate=evaluate,
                count=examples or 512,
                tokenizer=tokenizer,
            )

            for path in files.values():
                check_writable(loaded.model, path, arch=loaded.arch, trust=trust or ())

            def keep(small: Any, one: Any) -> Path:
                path = files[one]
                with result_at(path, trust=trust, force=force) as file:
                    assert file is not None
                    file.write(small, loaded.arch, model)
                return path

            found = studies.sweep(
                loaded.model,
                targets,
                asked,
                calibrate=data.calibration,
                evaluate=data.evaluation,
                metric=metric,
                beside=not no_svd,
                keep=keep if files else None,
                source=loaded.source,
                progress=progress,
            )
        write_reports(found, reports, force=force)
        if json_only:
            print(_as_json(found), end="")
        elif quiet:
            print(found.verdict)
        else:
            show(study.shown_sweep(found))
            show_files([*(point.file for point in found.points if point.file), *reports])


def _as_json(found: Any) -> str:
    return as_json(found.model_dump(mode="json", by_alias=True)) + "\n"
