"""The commands that look before a model is converted: inspect, probe and sweep."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from bp_convert.cli import budget_flags as b
from bp_convert.cli import flags as o
from bp_convert.cli.flag_checks import check_data
from bp_convert.cli.session import errors_shown, print_result, progress_shown, show, typed
from bp_convert.errors import CheckpointError


def probe(
    ctx: typer.Context,
    model: o.Model,
    arch: o.Arch = None,
    trust: o.Trust = None,
    allow_missing: o.AllowMissing = False,
    input: o.Input = None,
    calibrate: b.Calibrate = None,
    examples: b.Count = None,
    tokenizer: b.Tokenizer = None,
    error: Annotated[
        float, o.option(None, "--error E", "Relative error at which savings are counted.")
    ] = 0.3,
    include: o.Include = None,
    exclude: o.Exclude = None,
    ways: o.Ways = None,
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
        from bp_convert.cli.reading import settings_from
        from bp_convert.run.written import Outputs, check_model, write_reports
        from bp_convert.values.recipe import EXAMPLES, Job

        reports = report or []
        job = Job(
            name="probe",
            model=str(model),
            arch=arch,
            trust=tuple(trust or ()),
            allow_missing=allow_missing,
            tokenizer=None if tokenizer is None else str(tokenizer),
            settings=settings_from(
                include=include, exclude=exclude, ways=ways, inputs=input, seed=seed
            ),
            calibrate=calibrate,
            examples=examples or EXAMPLES,
        )
        check_model(model)
        outputs = Outputs(reports=tuple(reports), force=force, command=typed())
        outputs.check()
        from bp_convert import studies
        from bp_convert.run.learning import split_of
        from bp_convert.run.opening import opened

        with progress_shown(trail, quiet=quiet or json_only) as progress:
            source = opened(job)
            split = split_of(job, source.model)
            found = studies.probe(
                source.model,
                job.settings,
                calibrate=None if split.calibrate is None else split.calibrate.examples,
                error=error,
                source=source.words,
                progress=progress,
            )
        write_reports(found, outputs)
        print_result(found, json_only=json_only, quiet=quiet, verbose=verbose, files=reports)


def sweep(
    ctx: typer.Context,
    model: o.Model,
    target: b.Targets = None,
    arch: o.Arch = None,
    trust: o.Trust = None,
    allow_missing: o.AllowMissing = False,
    input: o.Input = None,
    calibrate: b.Calibrate = None,
    examples: b.Count = None,
    tokenizer: b.Tokenizer = None,
    method: b.Method = None,
    evaluate: b.Evaluate = None,
    metric: b.Metric = None,
    no_svd: Annotated[bool, o.option(b.GOAL, "--no-svd", "Leave truncated SVD out.")] = False,
    include: o.Include = None,
    exclude: o.Exclude = None,
    convert_anyway: o.ConvertAnyway = False,
    ways: o.Ways = None,
    keep_parametrized: o.KeepParametrized = False,
    merge_adapters: o.MergeAdapters = False,
    output: Annotated[
        Path | None,
        o.option(
            o.OUT, "-o --output FOLDER", "Write each point's model there, named by its target."
        ),
    ] = None,
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
        from bp_convert.cli.reading import settings_from, several
        from bp_convert.run.written import Outputs, check_model, write_reports
        from bp_convert.values.recipe import EXAMPLES, Job

        targets = several(target or ["params=0.5,0.25,0.1"])
        reports = report or []
        job = Job(
            name="sweep",
            model=str(model),
            arch=arch,
            trust=tuple(trust or ()),
            allow_missing=allow_missing,
            tokenizer=None if tokenizer is None else str(tokenizer),
            settings=settings_from(
                include=include,
                exclude=exclude,
                inputs=input,
                seed=seed,
                method=method,
                convert_anyway=convert_anyway,
                ways=ways,
                keep_parametrized=keep_parametrized,
                merge_adapters=merge_adapters,
            ),
            calibrate=calibrate,
            examples=examples or EXAMPLES,
            evaluate=evaluate,
            metric=metric,
        )
        files = {}
        if output is not None:
            name = f"{model.stem}-{{}}.pt"
            files = {one: output / name.format(str(one).replace("=", "-")) for one in targets}
        check_model(model)
        outputs = Outputs(reports=tuple(reports), force=force, command=typed())
        outputs.check()
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
        for path in files.values():
            Outputs(model=path, force=force).check()
        from bp_convert import studies
        from bp_convert.files.writable import check_writable
        from bp_convert.run.learning import split_of
        from bp_convert.run.opening import opened

        with progress_shown(trail, quiet=quiet or json_only) as progress:
            source = opened(job)
            for path in files.values():
                check_writable(source.model, path, arch=source.arch, trust=job.trust)
            split = split_of(job, source.model)
            found = studies.sweep(
                source,
                targets,
                job.settings,
                calibrate=None if split.calibrate is None else split.calibrate.examples,
                evaluate=None if split.evaluate is None else split.evaluate.examples,
                metric=metric,
                beside=not no_svd,
                files=files or None,
                trust=job.trust,
                force=force,
                progress=progress,
            )
        write_reports(found, outputs)
        written = [*(point.file for point in found.points if point.file), *reports]
        print_result(found, json_only=json_only, quiet=quiet, files=written)
        if not json_only and not quiet:
            for note in dict.fromkeys(note for point in found.points for note in point.notes):
                print(note)


def inspect(
    model: o.Model,
    arch: o.Arch = None,
    trust: o.Trust = None,
    allow_missing: o.AllowMissing = False,
    input: o.Input = None,
    alpha: b.Alpha = None,
    rank: b.Rank = None,
    pairs: b.Pairs = None,
    include: o.Include = None,
    exclude: o.Exclude = None,
    convert_head: o.ConvertHead = False,
    convert_anyway: o.ConvertAnyway = False,
    ways: o.Ways = None,
    keep_parametrized: o.KeepParametrized = False,
    merge_adapters: o.MergeAdapters = False,
    settings: o.SettingsFile = None,
    json_only: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Show what is in a model file, and what would happen to each layer."""
    with errors_shown() as trail:
        from bp_convert.cli.reading import settings_from
        from bp_convert.run.written import check_model

        asked = settings_from(
            settings,
            inputs=input,
            alpha=alpha,
            rank=rank,
            pairs=pairs,
            include=include,
            exclude=exclude,
            convert_head=convert_head,
            convert_anyway=convert_anyway,
            ways=ways,
            keep_parametrized=keep_parametrized,
            merge_adapters=merge_adapters,
        )
        check_model(model)
        from bp_convert import pipeline
        from bp_convert.files.converted import is_converted
        from bp_convert.reporting import report_of
        from bp_convert.run.job import run
        from bp_convert.run.streamed import by_layer
        from bp_convert.storage import plan_of
        from bp_convert.values.recipe import Job

        with progress_shown(trail, quiet=quiet or json_only) as progress:
            large = Job(name="inspect", model=str(model), arch=arch, settings=asked)
            if by_layer(large, None, dry=True):
                shown = run(large, dry=True, progress=progress).report
                assert shown is not None
                result = shown
            elif is_converted(model):
                result = report_of(plan_of(model), source="converted before")
            else:
                try:
                    loaded = pipeline.open_model(
                        model, arch=arch, trust=trust or (), allow_missing=allow_missing
                    )
                except CheckpointError:
                    if arch is None and _show_weights(model, quiet=quiet, json_only=json_only):
                        return
                    raise
                made = pipeline.plan(loaded.model, asked, progress=progress)
                result = report_of(made, source=loaded.source)
                result = result.model_copy(update={"notes": (*loaded.notes, *result.notes)})
        print_result(result, json_only=json_only, quiet=quiet, verbose=True)


def _show_weights(model: Path, *, quiet: bool, json_only: bool) -> bool:
    """Show the tensors of a file that holds weights and no model; return False for any other."""
    from bp_convert.files.arch import ARCH_FORMS
    from bp_convert.files.state import weights_alone
    from bp_convert.render.terminal import shown_weights, weights_line
    from bp_convert.values.base import as_json

    held = None
    with suppress(CheckpointError):
        held = weights_alone(model)
    if held is None:
        return False
    if json_only:
        forms = {
            name: {"shape": list(one.shape), "dtype": str(one.dtype).removeprefix("torch.")}
            for name, one in held.items()
        }
        print(as_json(forms))
    elif quiet:
        print(weights_line(model.name, held))
    else:
        fix = "To see what would become of each layer, say which model they belong to: --arch "
        show(shown_weights(model.name, held, f"{fix}{ARCH_FORMS}"))
    return True
