"""What a job is: a hash of everything that its result depends on."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bp_convert._version import __version__
from bp_convert.batch.sources import files_of
from bp_convert.data.factory import has_parts
from bp_convert.data.split import is_same
from bp_convert.files.atomic import digest_of_file
from bp_convert.values.recipe import Job

# Words and figures beside a result, and how it is reached: not what it is.
_BESIDE = {"name", "paper", "layerwise"}
LARGE = 2**30  # bytes; of a larger folder, names, sizes and times stand for the contents


@dataclass(frozen=True)
class Task:
    """A job that has to run.

    Attributes:
        identity: hash of the job.
        full: hash of the trained full model that it starts from.
    """

    job: Job
    identity: str
    full: str


class Identities:
    """Hashes of jobs. A file is read once, however many jobs name it."""

    def __init__(self) -> None:
        self._digest = cache(_digest)

    def task(self, job: Job) -> Task:
        """Return a job with its hashes."""
        return Task(job, self.of(job), self.of_full(job))

    def of(self, job: Job) -> str:
        """Hash a job: its keys, the contents of the files that it names, and the versions."""
        keys = job.model_dump(mode="json", by_alias=True, exclude=_BESIDE)
        return self._hash({"job": keys, "files": self._files(job)})

    def of_full(self, job: Job) -> str:
        """Hash the trained full model that a job starts from."""
        names = ("model", "arch", "trust", "allow_missing", "tokenizer", "train", "input")
        keys = job.model_dump(mode="json", by_alias=True, include={*names, "seed"})
        own = job.model_copy(update={"calibrate": None, "evaluate": None, "finetune": None})
        what: dict[str, Any] = {"full": keys, "files": self._files(own)}
        learnt = None if job.train is None else job.train.data
        if learnt and job.evaluate and is_same(learnt, job.evaluate) and not has_parts(learnt):
            scored = [job.evaluate, job.scored, job.calibrate, job.examples, job.request.seed]
            what["left out"] = scored
        return self._hash(what)

    def _files(self, job: Job) -> dict[str, str]:
        return {str(path): self._digest(path) for path in files_of(job)}

    @staticmethod
    def _hash(what: dict[str, Any]) -> str:
        versions = {"bp-convert": __version__, "torch": importlib.metadata.version("torch")}
        text = json.dumps({**what, "versions": versions}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:20]


def _digest(path: Path) -> str:
    if path.is_file():
        return digest_of_file(path, digits=20)
    if not path.is_dir():
        return "absent"
    found = sorted(one for one in path.rglob("*") if one.is_file() and not _hidden(one, path))
    stats = [one.stat() for one in found]
    whole = hashlib.sha256()
    large = sum(one.st_size for one in stats) > LARGE
    for one, stat in zip(found, stats, strict=True):
        inside = f"{stat.st_size}:{stat.st_mtime_ns}" if large else _digest(one)
        whole.update(f"{one.relative_to(path)}:{inside}\n".encode())
    return whole.hexdigest()[:20]


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith((".", "__pycache__")) for part in file.relative_to(folder).parts)
