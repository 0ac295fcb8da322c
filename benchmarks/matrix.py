"""Many architectures, each converted in four modes, saved, and read again in a fresh process.

    python benchmarks/matrix.py [--only PATTERN ...] [--modes share,alpha,target,full] [--jobs 2]
        [--limit 120] [--memory 10] [--out matrix.jsonl] [--page matrix] [--again] [--list]

The zoo (`benchmarks/zoo`) holds more than 250 architectures with random weights: torchvision, timm,
transformers and our own, each small enough for a mode to take seconds. The modes:

* ``share``: a quarter of every layer's parameters (``rank=0.25``), also of layers so small that
  they become no faster (``convert_anyway``);
* ``alpha``: widened (``alpha=2``);
* ``target``: half of the parameters, spent by the weights alone (``target="params=0.5"``);
* ``full``: as many terms as it takes, every layer (``rank=10**6``), which has to be exact;
* ``none``: built and run only, to see that the zoo itself is sound.

What is checked in every mode: the converted model answers as its dense equivalent
(``bp_convert.to_dense``), at full rank as the source, on equal inputs and draws (1e-4 in float32);
the source is the same to the bit; the file loads in a process that did not make the model, and
answers the same there. Detectors, whose outputs have a length that depends on rounding, are
compared by the outputs of their backbone and heads. Where outputs are further apart, they may be
as far as those of the plain layers move when their weights are moved by eight roundings.

What can come of it: ``converted``; ``kept`` (nothing to convert, each layer with its reason);
``refused`` (a BpConvertError); ``failed`` (any other error, the time or the memory limit);
``wrong`` (differs); ``not reloadable`` (cannot be saved, or loaded equal).

Each architecture and mode runs in a process of its own and is one JSON line in ``--out``; what
stands there already is not run again (``--again`` runs what did not convert). ``--page NAME``
writes NAME.md and NAME.html from all lines, also where nothing is left to run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.zoo.entry import Entry
from benchmarks.zoo.page import summary, write_pages
from benchmarks.zoo.registry import chosen, zoo
from benchmarks.zoo.trial import MODES, Record, Trial, reload
from benchmarks.zoo.workers import PAUSE, Child, Limits, finished, start

Key = tuple[str, str]  # an architecture's name and a mode


def read(path: Path) -> dict[Key, Record]:
    """Return the records of a file; later ones replace earlier ones."""
    if not path.exists():
        return {}
    lines = (json.loads(line) for line in path.read_text().splitlines() if line)
    return {(one["name"], one["mode"]): one for one in lines}


class Matrix:
    """The tasks at work, and the file that their records go to."""

    def __init__(self, out: Path, limits: Limits, jobs: int) -> None:
        self.out = out
        self.limits = limits
        self.jobs = jobs
        self.children: list[Child] = []
        self.half: dict[Key, Record] = {}  # converted and saved, not read again yet
        self.folder = Path(tempfile.mkdtemp(prefix="matrix-"))

    def run(self, todo: Sequence[tuple[Entry, str]]) -> None:
        """Run every task, two processes each: one converts, one reads."""
        waiting = list(todo)
        total = len(waiting)
        done = 0
        try:
            while waiting or self.children:
                while waiting and len(self.children) < self.jobs:
                    self._begin(*waiting.pop(0))
                for child, record, words in finished(self.children, self.limits):
                    record = self._next(child.key, record, words)
                    if record is not None:
                        done += 1
                        self._keep(record, f"{done}/{total}")
                time.sleep(PAUSE)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _home(self, key: Key) -> Path:
        return self.folder / f"{key[0].replace('/', '-')}-{key[1]}"

    def _begin(self, entry: Entry, mode: str) -> None:
        key = (entry.name, mode)
        home = self._home(key)
        home.mkdir()
        os.environ["BP_CONVERT_CACHE"] = str(home / "cache")
        self.children.append(start(key, Trial(entry, mode, home).run, home, self.limits))

    def _next(self, key: Key, record: Record | None, words: str) -> Record | None:
        """Take what a process left: go on with the second one, or return the whole record."""
        home, before = self._home(key), self.half.pop(key, None)
        if record is None:
            stage = (home / "stage").read_text() if (home / "stage").exists() else "start"
            outcome = "failed" if before is None else "not reloadable"
            base = before or {"name": key[0], "mode": key[1], "seconds": {}}
            return {**base, "outcome": outcome, "stage": stage, "text": words}
        if before is None and "file" in record:
            self.half[key] = record
            task = partial(reload, zoo()[key[0]], record, home)
            self.children.append(start(key, task, home, self.limits))
            return None
        if before is not None:
            record["wall"] += before["wall"]
            record["peak_mb"] = max(record["peak_mb"], before["peak_mb"])
        return record

    def _keep(self, record: Record, count: str) -> None:
        with self.out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        seconds = sum(record["seconds"].values())
        first = record.get("text", "").splitlines()[:2]
        print(
            f"{count:>9s} {record['name']:44s} {record['mode']:7s} {record['outcome']:14s} "
            f"{seconds:6.1f} s  {' | '.join(one.strip() for one in first)[:150]}",
            flush=True,
        )
        shutil.rmtree(self._home((record["name"], record["mode"])), ignore_errors=True)


def options() -> Any:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", default=[], help="pattern, or part of a name")
    parser.add_argument("--modes", default=",".join(MODES), help="separated by commas")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--limit", type=float, default=120, help="seconds that a process may take")
    parser.add_argument("--memory", type=float, default=10, help="GB of address space for each")
    parser.add_argument("--out", type=Path, default=Path("matrix.jsonl"), help="records, appended")
    parser.add_argument("--page", type=Path, help="write NAME.md and NAME.html")
    parser.add_argument("--again", action="store_true", help="run what did not convert once more")
    parser.add_argument("--list", action="store_true", help="print the names, run nothing")
    asked = parser.parse_args()
    asked.modes = asked.modes.split(",")
    if set(asked.modes) - {*MODES, "none"}:
        parser.error(f"modes: {', '.join(MODES)} or none")
    return asked


def main() -> None:
    """Run what is missing and print the totals."""
    asked = options()
    entries = chosen(asked.only)
    if asked.list:
        print("\n".join(one.name for one in entries))
        return
    known = read(asked.out)
    done = {
        key
        for key, one in known.items()
        if not asked.again or one["outcome"] in ("converted", "kept")
    }
    todo = [
        (entry, mode)
        for mode in asked.modes
        for entry in entries
        if (entry.name, mode) not in done and (not entry.modes or mode in (*entry.modes, "none"))
    ]
    if todo:
        _import_libraries()
        limits = Limits(asked.limit, int(asked.memory * 2**30))
        Matrix(asked.out, limits, asked.jobs).run(todo)
    names = {one.name for one in entries}
    records = [
        one for key, one in read(asked.out).items() if key[0] in names and key[1] in asked.modes
    ]
    print(summary(records))
    if asked.page is not None:
        write_pages(records, asked.page)


def _import_libraries() -> None:
    """Import what every child needs, but no model of transformers: nothing is computed, so that
    forks are safe, and a file is read in a process that does not know its classes yet."""
    import timm  # noqa: F401
    import torch._dynamo  # noqa: F401 - symbolic sizes take it, and it takes two seconds
    from transformers import GenerationMixin, PreTrainedModel  # noqa: F401

    import bp_convert.pipeline  # noqa: F401


if __name__ == "__main__":
    main()
