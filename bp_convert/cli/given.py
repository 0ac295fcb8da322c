"""Which options stand on the command line, and whether they go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer


def stands_there(ctx: typer.Context, option: str) -> bool:
    """Say whether an option was given on the command line."""
    source = ctx.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def given_in(ctx: typer.Context) -> dict[str, Any]:
    """Return the settings that stand on the command line, leaving defaults to the file."""
    names = {
        "alpha": "alpha", "rank": "rank", "pairs": "pairs", "init": "init", "include": "include",
        "exclude": "exclude", "convert_head": "convert_head", "seed": "seed",
        "convert_anyway": "convert_anyway", "input": "inputs", "target": "target",
        "method": "method",
    }  # fmt: skip
    given: dict[str, Any] = {}
    for option, field in names.items():
        if stands_there(ctx, option):
            given[field] = ctx.params[option]
    return given


def check_data(ctx: typer.Context) -> None:
    """Refuse options about data where there is none."""
    if not stands_there(ctx, "calibrate"):
        for option in ("examples", "tokenizer"):
            scored = option == "tokenizer" and stands_there(ctx, "evaluate")
            if stands_there(ctx, option) and not scored:
                raise typer.BadParameter(
                    f"--{option} is about data, and there is none. Add --calibrate", ctx=ctx
                )
    if stands_there(ctx, "metric") and not stands_there(ctx, "evaluate"):
        raise typer.BadParameter("--metric needs data to score on. Add --evaluate", ctx=ctx)


def check_together(ctx: typer.Context, given: dict[str, Any], plan: Path | None) -> None:
    """Refuse options of which one would silently do nothing."""
    asks = [*given, *(["settings"] if stands_there(ctx, "settings") else [])]
    if plan is not None and asks:
        option = "--" + asks[0].replace("_", "-").replace("inputs", "input")
        raise typer.BadParameter(
            f"{option} is for making a plan, and --plan applies one that is made. Leave {option} "
            "out, or make another plan with --plan-out",
            ctx=ctx,
        )
    check_data(ctx)
    if stands_there(ctx, "target") and (stands_there(ctx, "rank") or stands_there(ctx, "pairs")):
        raise typer.BadParameter(
            "--target chooses pairs and terms, --rank and --pairs set them. Give one or the "
            "other; a settings file can set them for single layers",
            ctx=ctx,
        )
    if ctx.params["dry_run"] and stands_there(ctx, "evaluate"):
        raise typer.BadParameter(
            "a dry run makes nothing that --evaluate could score. Leave one of the two out",
            ctx=ctx,
        )
    if ctx.params["dry_run"] and stands_there(ctx, "finetune"):
        raise typer.BadParameter(
            "a dry run makes nothing that --finetune could train. Leave one of the two out",
            ctx=ctx,
        )
    timed = stands_there(ctx, "measure") or stands_there(ctx, "batch")
    if ctx.params["dry_run"] and timed:
        raise typer.BadParameter(
            "a dry run converts nothing that --measure could time. Leave one of the two out",
            ctx=ctx,
        )
