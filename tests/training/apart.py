"""Runs in processes of their own, forked from a server that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["tests.training.runs", "bp_convert.training.finetuning", "bp_convert.pipeline"]
)


def spawn(mode: str, folder: Path, **environment: str) -> BaseProcess:
    """Start a run; what it says when it fails goes to ``error-RANK.txt``."""
    process = CONTEXT.Process(target=_work, args=(mode, folder, environment), daemon=True)
    process.start()
    return process


def _work(mode: str, folder: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    import torch

    from tests.training import runs

    torch.set_num_threads(1)
    try:
        runs.work(mode, folder)
    except BaseException:
        rank = os.environ.get("RANK", "0")
        (folder / f"error-{rank}.txt").write_text(traceback.format_exc())
        sys.exit(1)


def together(mode: str, folder: Path, world: int = 2) -> None:
    """Do what torchrun does: start the processes of a group, and wait for them."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    processes = [
        spawn(
            mode,
            folder,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            RANK=str(rank),
            LOCAL_RANK=str(rank),
        )
        for rank in range(world)
    ]
    for one in processes:
        one.join(60)
    errors = [path.read_text() for path in sorted(folder.glob("error-*.txt"))]
    assert all(one.exitcode == 0 for one in processes), "\n".join(errors)
