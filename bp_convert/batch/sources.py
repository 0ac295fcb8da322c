"""The files that a job names: whether they are there, and whether their code may run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from bp_convert.batch.book import Stated
from bp_convert.data.factory import has_parts
from bp_convert.data.split import check_apart
from bp_convert.errors import DataError, RecipeError
from bp_convert.values.architecture import Architecture
from bp_convert.values.recipe import Job

_NAMES = re.compile(r"[A-Za-z]\w*")  # of data sets that torchvision and others know


def data_sources(job: Job) -> Iterator[tuple[str, str]]:
    """Yield (key, source) for all data that a job names."""
    found = {"calibrate": job.calibrate, "evaluate": job.evaluate}
    for key, training in job.trainings.items():
        found[f"{key}.data"] = training.data
        if isinstance(training.validation, str):
            found[f"{key}.validation"] = training.validation
    yield from ((key, one) for key, one in found.items() if one)


def code_files(job: Job) -> Iterator[tuple[str, Path]]:
    """Yield (key, file) for all Python files that a job runs."""
    named = [*data_sources(job), ("arch", job.arch or ""), ("metric", job.metric or "")]
    for key, training in job.trainings.items():
        named += [(f"{key}.optimizer", training.optimizer)]
        named += [(f"{key}.schedule", training.schedule)]
    for key, text in named:
        file, colon, _ = text.partition("?")[0].rpartition(":")
        if colon and file.endswith(".py"):
            yield key, Path(file)


def files_of(job: Job) -> Iterator[Path]:
    """Yield every file and folder that a job's result depends on, as far as it names them."""
    if job.model:
        yield Path(job.model).expanduser()
    if job.tokenizer:
        yield Path(job.tokenizer).expanduser()
    asked = Architecture.parse(job.arch or "")
    if asked.source == "transformers":
        yield Path(asked.name)
    yield from (path for _, path in code_files(job))
    yield from (Path(one) for one in job.trust if one.endswith(".py"))
    for _, source in data_sources(job):
        name, _, options = source.partition("?")
        if Path(name).expanduser().exists():
            yield Path(name).expanduser()
        elif _NAMES.fullmatch(name):
            given = [one.partition("=") for one in options.split("&")]
            root = next((Path(value) for key, _, value in given if key == "root"), Path("data"))
            yield root.expanduser() / name if (root / name).exists() else root.expanduser()


def check_files(stated: Stated) -> None:
    """Refuse a job whose files are not there, or whose code nobody has allowed to run.

    Raises:
        RecipeError: with the place in the recipe.
    """
    job = stated.job
    for key in ("model", "tokenizer"):
        text = getattr(job, key)
        if text is not None and not Path(text).expanduser().exists():
            raise _absent(stated, key, text, "a file or folder that is there")
    for key, path in code_files(job):
        if not path.is_file():
            raise _absent(stated, key, str(path), "a Python file that is there")
        if path.resolve() not in {Path(one).resolve() for one in job.trust}:
            raise RecipeError(
                where=stated.at(key),
                found=f"{path} would be run",
                allowed="Python files that the recipe names under trust",
                fix=f"if you trust its code, add it: `trust: [{path}]`",
            )
    if job.arch is not None:
        _check_arch(stated, job.arch)
    for key, source in data_sources(job):
        name = source.partition("?")[0]
        known = _NAMES.fullmatch(name) or ".py:" in name
        if not known and not Path(name).expanduser().exists():
            raise _absent(stated, key, name, "a file or folder of examples, or a data set's name")


def check_scores(stated: Stated) -> None:
    """Refuse to validate on what a job trains on, as far as names alone tell.

    Raises:
        RecipeError: one source without parts is learnt and validated on.
    """
    for key, training in stated.job.trainings.items():
        if not training.data or not isinstance(training.validation, str):
            continue
        apart = has_parts(training.data) is not False
        try:
            check_apart(training.data, training.validation, training.validation, parts=apart)
        except DataError as problem:
            raise RecipeError(
                where=stated.at(f"{key}.validation"),
                found=f"{training.validation}, which {key} trains on",
                allowed=problem.allowed,
                fix=problem.fix,
            ) from None


def _check_arch(stated: Stated, arch: str) -> None:
    asked = Architecture.parse(arch)
    if asked.source == "transformers" and not Path(asked.name, "config.json").is_file():
        raise _absent(stated, "arch", asked.name, "the folder of a transformers model")
    if not asked.source or not asked.name:
        raise RecipeError(
            where=stated.at("arch"),
            found=repr(arch),
            allowed="torchvision:NAME, timm:NAME, bp:NAME, transformers:FOLDER, or FILE.py:FACTORY",
            fix="say where the architecture comes from, such as torchvision:resnet18",
        )


def _absent(stated: Stated, key: str, name: str, allowed: str) -> RecipeError:
    return RecipeError(
        where=stated.at(key),
        found=f"nothing at {name}",
        allowed=allowed,
        fix=f"correct the path; it is looked up from {Path.cwd()}, where the command runs",
    )
