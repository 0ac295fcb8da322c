"""Small runs that the tests share, also as a script: one that can be killed, and distributed ones.

python runs.py MODE FOLDER   with the environment that torchrun sets, for several processes
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bp_convert


class Digest(nn.Module):
    """A classifier with dropout and batch norm: state that resuming must not lose."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32)
        )
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.body(x)))
        return out


def data(count: int = 200) -> tuple[Tensor, Tensor]:
    """Points of four classes."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(count, 16, generator=generator)
    return points, (points @ torch.randn(16, 4, generator=generator)).argmax(1)


def plain(seed: int = 0) -> nn.Module:
    """A dense model without anything random or per batch."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def converted(seed: int = 0) -> tuple[nn.Module, nn.Module]:
    """A converted model, and its source."""
    source = plain(seed)
    small, _ = bp_convert.convert(source, rank=2, convert_anyway=True, exclude="2", inputs=["16"])
    return small, source


KILLS = int(os.environ.get("BP_CONVERT_TEST_KILLS", "4"))  # in a long run
LONG: dict[str, Any] = {
    "epochs": KILLS + 2, "batch": 16, "accumulate": 2, "ema": 0.9, "validate_every": 5, "lr": 0.01,
    "warmup": 0.1, "checkpoint_every": 2, "seed": 3,
}  # fmt: skip


def long_run(folder: Path | None, *, resume: bool = False, slow: float = 0.0, **more: Any) -> Any:
    """A run of everything that has a state."""
    torch.manual_seed(0)
    model = Digest()

    def wait(words: str, done: int, total: int) -> None:
        time.sleep(slow)

    return bp_convert.finetune(
        model, data(), folder=folder, resume=resume, progress=wait, **{**LONG, **more}
    )


def many(mode: str, folder: Path) -> Any:
    """What each of several processes does; return the report."""
    model, source = converted()
    if mode == "again":  # of what a run has returned
        model, _ = bp_convert.finetune(model, data(), steps=2, shard=False)
    more: dict[str, Any] = {"shard": True} if mode == "shard" else {}
    trained, report = bp_convert.finetune(
        model,
        data(),
        teacher=source,
        epochs=2,
        batch=20,
        accumulate=2,
        lr=0.01,
        optimizer="SGD",
        folder=folder / "run" if mode == "shard" else None,
        **more,
    )
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    torch.save(trained.state_dict(), folder / f"{mode}-{rank}.pt")
    if rank == 0:
        bp_convert.save(trained, folder / f"{mode}.pt", force=True)
        (folder / f"{mode}.json").write_text(report.model_dump_json())
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return report


def resumed_shards(folder: Path) -> None:
    """Train in shards, forget the last step's checkpoint, and go on from the one before."""
    model, source = converted()
    asked: dict[str, Any] = {
        "teacher": source, "shard": True, "ema": 0.9, "steps": 6, "checkpoint_every": 2,
        "batch": 20, "lr": 0.01, "folder": folder / "run",
    }  # fmt: skip
    whole, _ = bp_convert.finetune(model, data(), **asked)
    if torch.distributed.get_rank() == 0:
        max((folder / "run").glob("step-*.pt")).unlink()
    torch.distributed.barrier()
    again, report = bp_convert.finetune(model, data(), resume=True, **asked)
    assert report.resumed_from == 4
    ours, theirs = whole.state_dict(), again.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    torch.distributed.destroy_process_group()


def work(mode: str, folder: Path) -> None:
    """Do what a process is started for."""
    if mode == "resumed":
        resumed_shards(folder)
    elif mode == "long":
        trained, _ = long_run(folder, resume=True, slow=0.02)
        torch.save(trained.state_dict(), folder / "final.pt")
    else:
        many(mode, folder)
