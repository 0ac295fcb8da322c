"""Which versions of torch the tool works with: the core tests but the slow ones against each, in a
venv of its own.

Run by ``make compat``, or by ``python tests/compat.py 2.6.0 2.8.0`` for some versions alone. Each
venv is made with the pip configuration of the machine and as a user would make it: ``pip install
torch==VERSION bp-convert``; pip finds the torchvision that belongs to it. A wheel of torch for
CUDA takes about 8 GB with what it needs, so a venv is removed when its tests are done.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
VERSIONS = (
    "2.6.0",
    "2.7.1",
    "2.8.0",
    "2.9.1",
    "2.10.0",
    "2.11.0",
    "2.12.1",
    "2.13.0",
    "2.14.1",
)
ROOMS = ("contract", "files", "graph", "kinds", "kron", "layers", "laws", "values")
CORE = (*(f"tests/{room}" for room in ROOMS), "tests/test_planner.py", "tests/test_surgery.py")
# Without importing it: one that does not belong to this torch fails.
SAYS_VERSION = "from importlib.metadata import version; print(version('torchvision'))"
# What the core tests need beside the tool itself.
EXTRAS = ("hypothesis", "opt_einsum", "pytest>=8.3", "pytest-xdist", "timm", "transformers")
HEAD = ("torch", "torchvision", "Python", "passed", "failed", "skipped", "seconds")


class Row(NamedTuple):
    """One line of the table."""

    torch: str
    torchvision: str
    python: str
    passed: int | str
    failed: int | str
    skipped: int | str
    seconds: int | str


def line(row: tuple[object, ...]) -> str:
    """Lay a row out in Markdown."""
    return f"| {' | '.join(map(str, row))} |"


def call(log: Path, *words: str) -> int:
    """Run a command, with what it prints added to a log."""
    with log.open("a") as file:
        return subprocess.run(
            words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode


def printed(*words: str) -> str:
    """Run a command and return what it prints."""
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def measured(version: str, folder: Path, tests: list[str], *, keep: bool, workers: str) -> Row:
    """Install one version of torch, run the tests, and count."""
    place, log = folder / f"torch-{version}", folder / f"torch-{version}.log"
    python = str(place / ("Scripts" if os.name == "nt" else "bin") / "python")
    log.unlink(missing_ok=True)
    nothing = Row(version, "", "{}.{}.{}".format(*sys.version_info), "", "", "", "")
    try:
        if not Path(python).exists():
            venv.create(place, with_pip=True, clear=True)
        pip = (python, "-m", "pip", "install", "--quiet", "--no-cache-dir")
        if call(log, *pip, f"torch=={version}", "--editable", ".", *EXTRAS):
            return nothing._replace(passed="not installed")
        report = folder / f"torch-{version}.xml"
        report.unlink(missing_ok=True)
        start = time.perf_counter()
        call(log, python, "-m", "pytest", *tests, "-q", "-n", workers, "-m", "not slow",
             "-p", "no:cacheprovider", "-o", "junit_family=xunit1",
             f"--junitxml={report}")  # fmt: skip
        seconds = round(time.perf_counter() - start)
        vision = printed(python, "-c", SAYS_VERSION)
        if not report.exists():
            return nothing._replace(torchvision=vision, passed="not run", seconds=seconds)
        counts = ElementTree.parse(report).getroot()[0].attrib
        failed = int(counts["failures"]) + int(counts["errors"])
        skipped = int(counts["skipped"])
        passed = int(counts["tests"]) - failed - skipped
        return Row(version, vision, nothing.python, passed, failed, skipped, seconds)
    finally:
        if not keep:
            shutil.rmtree(place, ignore_errors=True)


def main() -> int:
    """Measure each version and print the table; 1 where a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("versions", nargs="*", default=VERSIONS, help="versions of torch")
    parser.add_argument("--folder", type=Path, default=ROOT / ".compat", help="venvs and logs")
    parser.add_argument("--keep", action="store_true", help="keep the venvs, for the next run")
    parser.add_argument("--workers", default="2", help="processes that run tests")
    parser.add_argument("--tests", nargs="+", default=list(CORE), help="tests instead of the core")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    print(line(HEAD), line(("---",) * len(HEAD)), sep="\n", flush=True)
    good = True
    for version in given.versions:
        row = measured(version, given.folder, given.tests, keep=given.keep, workers=given.workers)
        print(line(row), flush=True)
        good = good and row.failed == 0
    print(f"What each printed: {given.folder}/torch-VERSION.log")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
