"""Which options do not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer


def check_data(
    ctx: typer.Context,
    *,
    calibrate: str | None,
    examples: int | None,
    tokenizer: Path | None,
    evaluate: str | None = None,
    metric: str | None = None,
    tuned: bool = False,
) -> None:
    """Refuse options about data where there is none."""
    if calibrate is None:
        alone = {
            "examples": examples,
            "tokenizer": None if evaluate else tokenizer,
            "reconstruct": tuned or None,
        }
        for name in (name for name, value in alone.items() if value is not None):
            raise typer.BadParameter(
                f"--{name} is about data, and there is none. Add --calibrate", ctx=ctx
            )
    if metric is not None and evaluate is None:
        raise typer.BadParameter("--metric needs data to score on. Add --evaluate", ctx=ctx)


def reconstruct_of(ctx: typer.Context, wanted: bool | None, epochs: int | None) -> Any:
    """Return the setting that ``--reconstruct`` and ``--reconstruct-epochs`` stand for; None where
    neither was given."""
    if epochs is None:
        return None if wanted is None else "on" if wanted else "off"
    if wanted is False:
        raise typer.BadParameter(
            "--no-reconstruct tunes nothing, for no number of epochs. Leave one of the two out",
            ctx=ctx,
        )
    return {"epochs": epochs}


def check_plan(ctx: typer.Context, plan: Path | None, **asks: object) -> None:
    """Refuse to make a plan where one is given.

    Args:
        asks: options that are for making one; None and False were not given.
    """
    given = [name for name, value in asks.items() if value is not None and value is not False]
    if plan is not None and given:
        flag = "--" + given[0].replace("_", "-")
        raise typer.BadParameter(
            f"{flag} is for making a plan, and --plan applies one that is made. Leave {flag} "
            "out, or make another plan with --plan-out",
            ctx=ctx,
        )


def check_target(ctx: typer.Context, target: object, rank: object, pairs: object) -> None:
    """Refuse to set what a target chooses."""
    if target is not None and (rank is not None or pairs is not None):
        raise typer.BadParameter(
            "--target chooses pairs and terms, --rank and --pairs set them. Give one or the "
            "other; a settings file can set them for single layers",
            ctx=ctx,
        )


def check_dry_run(ctx: typer.Context, *, evaluate: object, finetune: object, timed: bool) -> None:
    """Refuse what a dry run makes nothing for."""
    for given, why in (
        (evaluate, "makes nothing that --evaluate could score"),
        (finetune, "makes nothing that --finetune could train"),
        (timed, "converts nothing that --measure could time"),
    ):
        if given:
            raise typer.BadParameter(f"a dry run {why}. Leave one of the two out", ctx=ctx)
