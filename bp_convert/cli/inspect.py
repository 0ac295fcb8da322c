"""The command that looks into a model file."""

from __future__ import annotations

from pathlib import Path

from bp_convert.cli import flags as o
from bp_convert.cli.session import errors_shown, print_result, progress_shown, show
from bp_convert.errors import CheckpointError


def inspect(
    model: o.Model,
    arch: o.Arch = None,
    trust: o.Trust = None,
    allow_missing: o.AllowMissing = False,
    input: o.Input = None,
    alpha: o.Alpha = None,
    rank: o.Rank = None,
    pairs: o.Pairs = None,
    include: o.Include = None,
    exclude: o.Exclude = None,
    convert_head: o.ConvertHead = False,
    convert_anyway: o.ConvertAnyway = False,
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
        )
        check_model(model)
        from bp_convert import pipeline
        from bp_convert.files.converted import is_converted
        from bp_convert.reporting import report_of
        from bp_convert.storage import plan_of

        with progress_shown(trail, quiet=quiet or json_only) as progress:
            if not model.is_dir() and is_converted(model):
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
    from bp_convert.files.listing import weights_alone
    from bp_convert.render.terminal import shown_weights, weights_line
    from bp_convert.values.text import as_json

    try:
        held = weights_alone(model)
    except CheckpointError:
        return False
    if held is None:
        return False
    if json_only:
        forms = {one.name: {"shape": list(one.shape), "dtype": one.dtype} for one in held}
        print(as_json(forms))
        return True
    if quiet:
        print(weights_line(model.name, held))
        return True
    fix = "To see what would become of each layer, say which model they belong to: --arch "
    show(shown_weights(model.name, held, f"{fix}{ARCH_FORMS}"))
    return True
