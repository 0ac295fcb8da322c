"""The folder of results: a job's folder appears whole or not at all.

``jobs/NAME`` holds finished jobs, ``failed/NAME`` the logs of those that failed, ``full`` trained
full models by hash, ``.work`` what is under way. A job writes into ``.work`` and its folder is
renamed into place with a marker in it; a process that is killed leaves nothing but ``.work``.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import ValidationError

from bp_convert.errors import CheckpointError, RecipeError
from bp_convert.files.atomic import sync, write_text
from bp_convert.values.outcome import Outcome

DONE = "done.json"
RESULT = "result.json"
LOG = "log.txt"


class Results:
    """The folder of results of one recipe.

    Args:
        folder: is made when first written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def work(self) -> Path:
        """Where unfinished things lie."""
        return self.folder / ".work"

    def home(self, name: str) -> Path:
        """Return the folder of a finished job."""
        return self.folder / "jobs" / name

    def failed(self, name: str) -> Path:
        """Return the folder of a job that failed."""
        return self.folder / "failed" / name

    def training(self, identity: str) -> Path:
        """Return where a job's training keeps its checkpoints while it is not finished."""
        return self.work / f"training-{identity}"

    def identity(self, name: str) -> str | None:
        """Return the hash of the finished job of this name; None where there is none."""
        try:
            found = json.loads((self.home(name) / DONE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return str(found.get("identity")) if isinstance(found, dict) else None

    def outcome(self, name: str, identity: str) -> Outcome | None:
        """Return the outcome of a job that is finished, or that failed; None where neither."""
        homes = [self.home(name)] if self.identity(name) == identity else []
        for home in (*homes, self.failed(name)):
            with contextlib.suppress(OSError, ValidationError):
                text = (home / RESULT).read_text(encoding="utf-8")
                found = Outcome.model_validate_json(text)
                if found.identity == identity:
                    folder = home.relative_to(self.folder).as_posix()
                    return found.model_copy(update={"folder": folder})
        return None

    def names(self) -> list[str]:
        """Return the names of the finished jobs that stand here, of whatever recipe."""
        home = self.folder / "jobs"
        return (
            sorted(one.name for one in home.iterdir() if (one / DONE).is_file())
            if (home.is_dir())
            else []
        )

    @contextmanager
    def drafted(self, name: str) -> Iterator[Path]:
        """Yield an empty folder under ``.work``; it is gone afterwards, unless it was landed."""
        draft = self.work / f"{name}.{os.getpid()}.{secrets.token_hex(4)}"
        draft.mkdir(parents=True)
        try:
            yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def land(self, draft: Path, outcome: Outcome) -> bool:
        """Move a finished job's folder into place; return False where it is there already.

        A folder of the same name from another state of the recipe is replaced.
        """
        write_text(draft / RESULT, outcome.model_dump_json(indent=1) + "\n")
        home = self.home(outcome.name)
        if outcome.state != "done":
            home = self.failed(outcome.name)
            _replace(draft, home, self.work)
            return True
        if self.identity(outcome.name) == outcome.identity:
            return False
        marker = {"identity": outcome.identity, "name": outcome.name}
        write_text(draft / DONE, json.dumps(marker) + "\n")  # the last file that is written
        _sync_all(draft)
        _replace(draft, home, self.work)
        shutil.rmtree(self.failed(outcome.name), ignore_errors=True)
        shutil.rmtree(self.training(outcome.identity), ignore_errors=True)
        return True

    def sweep(self) -> None:
        """Remove what killed runs left, but for the checkpoints of their training."""
        if self.work.is_dir():
            for one in self.work.iterdir():
                if one.is_dir() and not one.name.startswith("training-"):
                    shutil.rmtree(one, ignore_errors=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder: two runs never write into one. The lock dies with the process.

        Raises:
            CheckpointError: the folder cannot be made.
            RecipeError: another run holds it.
        """
        try:
            self.work.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.work / "run.lock", timeout=0)
            lock.acquire()
        except Timeout:
            raise RecipeError(
                where=str(self.folder),
                found="another run that writes there",
                allowed="one run at a time in a folder",
                fix="wait for it, or name another folder with -o",
            ) from None
        except OSError as problem:
            raise CheckpointError(
                where=str(self.folder),
                found=f"it cannot be written: {problem.strerror or problem}",
                allowed="a folder that can be written",
                fix="name another folder with -o",
            ) from None
        try:
            yield
        finally:
            lock.release()


def _replace(draft: Path, home: Path, work: Path) -> None:
    """Rename a folder into place; what stood there is moved aside and then removed."""
    home.parent.mkdir(parents=True, exist_ok=True)
    aside = work / f"old.{os.getpid()}.{secrets.token_hex(4)}"
    if home.exists():
        home.rename(aside)
    draft.rename(home)
    with contextlib.suppress(OSError):
        sync(home.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _sync_all(folder: Path) -> None:
    """Put every file of a folder on the disk before its marker counts."""
    with contextlib.suppress(OSError):  # not every system opens folders
        for one in folder.rglob("*"):
            sync(one)
        sync(folder)
