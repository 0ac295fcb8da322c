"""The command that writes a model for another runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bp_convert.cli import flags as o
from bp_convert.cli.session import errors_shown, print_result, progress_shown, typed
from bp_convert.values.literals import Form, Goal

TO = "For which runtime   --to onnx -o small.onnx"
HOW = "How it is compared   --against original.pt --batch 1 --batch 32"


def export(
    model: o.Model,
    to: Annotated[
        Goal,
        o.option(TO, "--to RUNTIME", "onnx, openvino, executorch or torch-export."),
    ],
    output: Annotated[
        Path,
        o.option(
            TO,
            "-o --output FILE",
            "Where it goes: .onnx, .xml (its .bin beside it), .pte or .pt2.",
        ),
    ],
    form: Annotated[
        Form | None,
        o.option(
            TO,
            "--form NAME",
            "Of every bilinear layer: factors (products at run time), built (the runtime builds "
            "the weight when it loads the file) or dense. Default: what is fastest, layer by "
            "layer.",
        ),
    ] = None,
    fixed: Annotated[
        bool, o.option(TO, "--fixed", "Fix the lengths of sequences; the batch stays free.")
    ] = False,
    against: Annotated[
        Path | None,
        o.option(
            HOW,
            "--against MODEL",
            "The dense model to compare size and time with. Default: this one turned back.",
        ),
    ] = None,
    batch: Annotated[
        list[int] | None,
        o.option(
            HOW,
            "--batch N",
            "Batch size to compare and time at; default 1 and 8. Repeat.",
            min=1,
        ),
    ] = None,
    input: o.Input = None,
    arch: o.Arch = None,
    trust: o.Trust = None,
    report: o.ReportFile = None,
    force: o.Force = False,
    json_only: o.Json = False,
    quiet: o.Quiet = False,
    verbose: o.Verbose = False,
) -> None:
    """Write a model for another runtime, run it there, and compare it with its dense export."""
    with errors_shown() as trail:
        from bp_convert.run.written import Outputs, check_model, write_reports

        for one in filter(None, (model, against)):
            check_model(one)
        outputs = Outputs(reports=tuple(report or ()), force=force, command=typed())
        outputs.check()
        from bp_convert import exporting
        from bp_convert.run.opening import any_model

        with progress_shown(trail, quiet=quiet or json_only) as progress:
            opened, _ = any_model(str(model), arch, trust or ())
            dense = None if against is None else any_model(str(against), arch, trust or ())[0]
            done = exporting.export(
                opened,
                output,
                to=to,
                inputs=input,
                against=dense,
                form=form,
                sequences=not fixed,
                **({} if batch is None else {"batches": tuple(batch)}),
                force=force,
                progress=progress,
                source=str(model),
            )
        write_reports(done, outputs)
        files = [*done.files, *outputs.reports]
        print_result(done, json_only=json_only, quiet=quiet, verbose=verbose, files=files)
