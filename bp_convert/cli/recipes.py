"""The commands for recipes: run, validate, schema, init."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bp_convert.cli import flags as o
from bp_convert.cli.session import DONE, FAILED, errors_shown, progress_shown, show, show_files
from bp_convert.errors import CheckpointError
from bp_convert.values.progress import Onlooker

if TYPE_CHECKING:
    from bp_convert.values.outcome import Outcome

app = typer.Typer(
    rich_markup_mode="markdown",
    no_args_is_help=True,
    help="Run batches of conversions from a file.",
)


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="A YAML or JSON file.")],
    output: Annotated[
        Path | None,
        o.option(
            None,
            "-o --output FOLDER",
            "Where results go. Default: the recipe's `output`, or runs/NAME.",
        ),
    ] = None,
    jobs: Annotated[int, o.option(None, "--jobs N", "Jobs at a time.", min=1)] = 1,
    only: Annotated[
        list[str] | None,
        o.option(None, "--only PATTERN", "Only jobs of these names. Repeat for more."),
    ] = None,
    resume: Annotated[
        bool, o.option(None, "--resume", "Go on: keep finished jobs that nothing has changed for.")
    ] = False,
    force: Annotated[bool, o.option(None, "--force", "Do finished jobs again.")] = False,
    keep_going: Annotated[
        bool, o.option(None, "--keep-going", "Start further jobs after one has failed.")
    ] = False,
    dry_run: Annotated[
        bool, o.option(None, "--dry-run", "Show every job's plan and cost, and stop.")
    ] = False,
    executor: Annotated[
        Literal["local", "ray"],
        o.option(
            None,
            "--executor local|ray",
            "Where jobs run: processes here, or a Ray cluster (RAY_ADDRESS, else one of its own).",
        ),
    ] = "local",
    json_only: Annotated[bool, o.option(None, "--json", "Print the summary as JSON only.")] = False,
    quiet: Annotated[bool, o.option(None, "--quiet -q", "Print the verdict only.")] = False,
) -> None:
    """Run the jobs of a recipe; results go into a folder with a summary.html."""
    if resume and force:
        raise typer.BadParameter("--resume keeps finished jobs, --force does them again: give one")
    with errors_shown() as trail:
        from bp_convert.batch.book import read_recipe

        book = read_recipe(recipe)
        folder = output or book.output
        from bp_convert.batch.execute import run_recipe, selected

        chosen = selected(book, only or ())
        if dry_run:
            from bp_convert.batch.estimate import estimates
            from bp_convert.pages.batch import shown_estimates
            from bp_convert.values.base import as_json

            with progress_shown(trail, quiet=quiet or json_only) as progress:
                found = list(estimates(chosen, progress))
            if json_only:
                print(as_json(found))
            else:
                show(shown_estimates(book.name, found))
            raise SystemExit(FAILED if any(one.problem for one in found) else DONE)
        names = [one.job.name for one in chosen]
        try:
            with _watched(names, quiet=quiet or json_only) as watch:
                summary = run_recipe(
                    book,
                    chosen,
                    folder,
                    watch,
                    jobs=jobs,
                    executor=executor,
                    resume=resume,
                    force=force,
                    keep_going=keep_going,
                )
        except KeyboardInterrupt:
            print(
                f"interrupted; what is finished is in {folder}, and --resume goes on",
                file=sys.stderr,
            )
            raise SystemExit(130) from None
        from bp_convert.pages.batch import document, shown
        from bp_convert.render.batch_cells import verdict

        if json_only:
            print(document(summary, "json"), end="")
        elif quiet:
            print(verdict(summary))
        else:
            show(shown(summary))
            show_files(folder / f"summary.{form}" for form in ("html", "md", "csv", "json"))
        failed = any(one.state == "failed" for one in summary.jobs if one.name in names)
        raise SystemExit(FAILED if failed else DONE)


@app.command()
def validate(
    recipes: Annotated[list[Path], typer.Argument(metavar="RECIPE...", help="Recipe files.")],
    no_files: Annotated[
        bool, o.option(None, "--no-files", "Do not look whether models and data are there.")
    ] = False,
) -> None:
    """Check recipes: keys, values, names, and whether the files they name are there."""
    with errors_shown():
        from bp_convert.batch.book import read_recipe
        from bp_convert.batch.sources import check_files, check_scores

        for path in recipes:
            book = read_recipe(path)
            for one in book.jobs:
                check_scores(one)
                if not no_files:
                    check_files(one)
            code = sorted({trusted for one in book.jobs for trusted in one.job.trust})
            words = f"; runs code of {', '.join(code)}" if code else ""
            count = "1 job" if len(book.jobs) == 1 else f"{len(book.jobs)} jobs"
            print(f"{path}: {count}{words}")


@app.command()
def schema() -> None:
    """Print the JSON schema of a recipe, by which editors complete and check one."""
    from bp_convert.values.recipe import Recipe

    made = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_written(Recipe.model_json_schema(by_alias=True)),
        "title": "bp-convert recipe",
    }
    print(json.dumps(made, indent=1))


@app.command()
def init(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model file, or an architecture FROM:NAME.")
    ],
    arch: o.Arch = None,
    output: Annotated[
        Path | None, o.option(None, "-o --output FILE", "Default: NAME.yaml in this folder.")
    ] = None,
    force: o.Force = False,
) -> None:
    """Write a commented recipe for a model, to start from."""
    with errors_shown():
        from bp_convert.batch.template import template
        from bp_convert.files.atomic import write_text

        _check_whole(Path(model), arch)
        text, file = template(model, arch, output)
        print(f"wrote {write_text(file, text, force=force)}")


def _check_whole(model: Path, arch: str | None) -> None:
    """Refuse to begin with a file that holds weights alone, without what they belong to."""
    if arch is not None or not model.is_file():
        return
    from bp_convert.files.arch import ARCH_FORMS
    from bp_convert.files.state import weights_alone

    if weights_alone(model) is not None:
        raise CheckpointError(
            where=str(model),
            found="weights without the model that they belong to",
            allowed=f"a whole model, or --arch with {ARCH_FORMS}",
            fix=f"bp-convert recipe init {model} --arch torchvision:resnet18, or whatever it is",
        )


def _written(schema: dict[str, Any]) -> dict[str, Any]:
    """Say how values are written in a file, where that differs from how they are kept."""
    definitions = schema.get("$defs", {})
    for name, example in (("TensorSpec", "3x224x224"), ("Target", "params=0.25")):
        if name in definitions:
            definitions[name] = {
                "anyOf": [
                    {"type": ["string", "integer"], "examples": [example]},
                    definitions[name],
                ]
            }
    for part in (schema, *definitions.values()):
        for key in ("input", "target", "trust", "report", "inputs"):
            one = part.get("properties", {}).get(key)
            if isinstance(one, dict) and one.get("type") == "array":
                kept = {k: v for k, v in one.items() if k in ("title", "default", "description")}
                items = one["items"]
                part["properties"][key] = {**kept, "anyOf": [one, items]}
    return schema


class _Printed(Onlooker):
    """Says what becomes of jobs, line by line, where no terminal shows a table."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.count = 0

    def ended(self, outcome: Outcome) -> None:
        """Say it."""
        self.count += 1
        words = f": {outcome.problem}" if outcome.problem else f" in {outcome.seconds:.1f} s"
        print(
            f"[{self.count}/{self.total}] {outcome.name} {outcome.state}{words}",
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def _watched(names: list[str], *, quiet: bool) -> Iterator[Onlooker]:
    """Yield whoever looks on: a live table on a terminal, lines elsewhere, nobody if quiet."""
    if quiet:
        yield Onlooker()
        return
    if not sys.stderr.isatty():
        yield _Printed(len(names))
        return
    from rich.console import Console
    from rich.live import Live

    from bp_convert.pages.batch import Board

    board = Board(names)
    console = Console(stderr=True)
    with Live(board, console=console, refresh_per_second=4, transient=True):
        yield board
