"""Write files whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from bp_convert.errors import CheckpointError
from bp_convert.hub.layout import PLAN

OUTPUT_SUFFIXES = (".pt", ".pth", ".safetensors")  # of a model's file
Write = Callable[[Path], object]
Prove = Callable[[Sequence[Path]], None]


def check_output(path: Path, *, force: bool = False, suffixes: Sequence[str] = ()) -> Path:
    """Return the real path that may be written; leave no trace.

    Args:
        suffixes: the endings that the name may have; any if empty.

    Raises:
        CheckpointError: the name has another ending, the file is there and ``force`` is not given,
            or its folder is absent or cannot be written.
    """
    if suffixes and path.suffix not in suffixes:
        raise _refused(
            path,
            f"the ending {path.suffix!r}" if path.suffix else "a name without an ending",
            f"a name that ends in {' or '.join(suffixes)}",
            f"name it {path.with_suffix(suffixes[0]).name}",
        )
    real = Path(os.path.realpath(path))  # a link stays; what it points at is replaced
    with _failures_of(path):
        if real.is_dir():
            raise _refused(path, "a folder", "the name of a file", "add a file name")
        if real.exists() and not real.is_file():
            raise _refused(path, "a device or a pipe", "a regular file", "give another name")
        if real.exists() and not force:
            raise _refused(
                path, "an existing file", "a new name", "give another name, or replace with --force"
            )
        if not real.parent.is_dir():
            raise _refused(
                path, f"no folder {real.parent}", "a file in an existing folder", "make the folder"
            )
        _mode_of_new(real)  # so one can be made there
    return real


def is_folder(path: str | Path) -> bool:
    """Tell a name for a folder of transformers from one for a file: it ends in a slash, has no
    ending, unless a number is one (``gpt2-0.25``), or is that of a folder."""
    if str(path).endswith(("/", os.sep)):
        return True
    path = Path(path)
    named = path.suffix[1:2].isalpha()
    return path.suffix not in OUTPUT_SUFFIXES and (not named or path.is_dir())


def check_folder(path: Path, *, force: bool = False) -> Path:
    """Return the real path of a folder that may be written; leave no trace.

    Raises:
        CheckpointError: it is there, and is not empty or a converted model that ``force`` lets be
            replaced; or it cannot be made.
    """
    real = Path(os.path.realpath(path))
    with _failures_of(path):
        if real.exists() and not real.is_dir():
            raise _refused(path, "a file", "the name of a folder", "give another name")
        there = real.is_dir() and any(real.iterdir())
        if there and not (real / PLAN).is_file():  # never somebody's own files, not by --force
            raise _refused(
                path,
                "a folder with files in it that bp-convert did not write",
                "a new or an empty folder",
                "give another name, or empty it",
            )
        if there and not force:
            raise _refused(
                path,
                "an existing model",
                "a new name",
                "give another name, or replace with --force",
            )
        if not real.parent.is_dir():
            raise _refused(
                path, f"no folder {real.parent}", "a folder in an existing one", "make that folder"
            )
        _mode_of_new(real)
    return real


def write_folder(
    path: Path, write: Write, *, force: bool = False, prove: Prove | None = None
) -> Path:
    """Write a folder under a temporary name, and rename it when it is complete.

    Args:
        write: fills the folder that it is given.
        prove: called with the complete folder; what it raises stops all.

    Raises:
        CheckpointError: as ``check_folder``, or it cannot be written; nothing is left behind.
    """
    real = check_folder(path, force=force)
    place = temporary(real)
    try:
        with _failures_of(path):
            place.mkdir()
            write(place)
            mode = _mode_of_new(real)
            for one in place.rglob("*"):
                if one.is_file():
                    one.chmod(mode)  # safetensors writes for the owner alone
                sync(one)
        if prove is not None:
            prove([place])
        with _failures_of(path):
            put_folder(place, real)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return path


def put_folder(place: Path, real: Path) -> None:
    """Rename a complete folder into place; one that stands there is removed after it."""
    aside = temporary(real)
    if real.is_dir():
        real.rename(aside)
    place.rename(real)
    with contextlib.suppress(OSError):
        sync(real.parent)
    shutil.rmtree(aside, ignore_errors=True)


def plan_path(path: Path) -> Path:
    """Return where the plan of a ``.safetensors`` file stands."""
    return path.with_suffix(".plan.json")


def write_all(
    writes: Sequence[tuple[Path, Write]],
    *,
    force: bool = False,
    prove: Prove | None = None,
    labels: Sequence[str] = (),
) -> list[Path]:
    """Write several files under temporary names, and rename them in turn when all are complete.

    Args:
        writes: for each file its path and a function that writes it to the path that it is given.
        force: replace existing files.
        prove: called with the temporary files when they are complete; what it raises stops all.
        labels: for each file what its temporary name is made of; chance where that is empty.

    Raises:
        CheckpointError: a file cannot be written; then nothing is left behind, and files that
            stood there before are unchanged.
    """
    done: list[tuple[Path, Path]] = []
    renamed = False
    try:
        for index, (path, write) in enumerate(writes):
            real = check_output(path, force=force)
            place = temporary(real, labels[index] if labels else "")
            done.append((place, real))
            with _failures_of(path):
                mode = stat.S_IMODE(real.stat().st_mode) if real.exists() else _mode_of_new(real)
                write(place)
                place.chmod(mode)  # safetensors writes for the owner alone
                sync(place)
        if prove is not None:
            prove([place for place, _ in done])
        for place, real in done:
            with _failures_of(real):
                place.replace(real)
            renamed = True
    finally:
        for place, _ in [] if renamed else done:  # what belongs to a renamed file is needed
            with contextlib.suppress(OSError):
                place.unlink(missing_ok=True)
    for folder in {real.parent for _, real in done}:
        with contextlib.suppress(OSError):  # not every system opens folders
            sync(folder)
    return [path for path, _ in writes]


def _mode_of_new(path: Path) -> int:
    """Return the permissions that a new file gets beside ``path``."""
    probe = temporary(path)
    probe.touch(exist_ok=False)
    try:
        return stat.S_IMODE(probe.stat().st_mode)
    finally:
        probe.unlink()


def write_hashed(folder: Path, stem: str, suffix: str, write: Write) -> Path:
    """Write a file whole or not at all, under a name that holds a hash of its contents.

    One rename makes both appear, so that no file is ever without its checksum.

    Returns:
        ``STEM-HASH.SUFFIX`` in the folder.

    Raises:
        CheckpointError: it cannot be written; then nothing is left behind.
    """
    place = temporary(folder / f"{stem}{suffix}")
    try:
        with _failures_of(folder / f"{stem}{suffix}"):
            write(place)
            sync(place)
            path = folder / f"{stem}-{digest_of_file(place)}{suffix}"
            place.replace(path)
    finally:
        with contextlib.suppress(OSError):
            place.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        sync(folder)
    return path


def digest_of_file(path: Path, digits: int = 16) -> str:
    """Return the first hex digits of the SHA-256 of a file's contents."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()[:digits]


def sweep_temporaries(folder: Path) -> None:
    """Remove what a killed process left half written in a folder that no other writes to."""
    for path in folder.glob(".bp-convert-*.tmp"):
        with contextlib.suppress(OSError):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def write_text(path: Path, text: str, *, force: bool = False) -> Path:
    """Write a text file whole or not at all.

    Raises:
        CheckpointError: the file exists and ``force`` is not given, or it cannot be written.
    """
    write = partial(Path.write_text, data=text, encoding="utf-8")
    return write_all([(path, write)], force=force)[0]


def temporary(path: Path, label: str = "") -> Path:
    """Return a name beside ``path`` for a file that is being written: by chance, or by a label."""
    return path.with_name(f".bp-convert-{label or secrets.token_hex(6)}.tmp")


def sync(path: Path) -> None:
    """Put a file or a folder on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _failures_of(path: Path) -> Iterator[None]:
    """Let what goes wrong, an OSError or what torch and safetensors make of it, be an error that
    names the file."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as problem:
        reason = getattr(problem, "strerror", None) or str(problem).splitlines()[0][:200]
        raise _refused(
            path,
            f"it cannot be written: {reason}",
            "a folder that can be written, with enough free space",
            "free some space, or write somewhere else",
        ) from problem


def _refused(path: Path, found: str, allowed: str, fix: str) -> CheckpointError:
    return CheckpointError(where=str(path), found=found, allowed=allowed, fix=fix)
