"""Two processes give what one gives with the same batches; shards come together in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bp_convert
from bp_convert.errors import TrainingError
from bp_convert.values.training import Trained
from tests.training import runs
from tests.training.apart import together


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("alone")
    runs.many("alone", folder)
    weights: dict[str, Any] = torch.load(folder / "alone-0.pt")
    return weights


def far(one: dict[str, Any], two: dict[str, Any]) -> float:
    return max(float((one[key] - two[key]).abs().max()) for key in one)


# Sums of float32 gradients in another order: some 1e-7 of weights of about 0.5 in each of 10 steps.
TOLERANCE = 1e-5


@pytest.mark.slow
def test_two_processes_equal_one_of_the_same_batch(tmp_path: Path, alone: dict[str, Any]) -> None:
    together("ddp", tmp_path)
    first, second = (torch.load(tmp_path / f"ddp-{rank}.pt") for rank in (0, 1))
    assert far(first, second) == 0
    assert far(first, alone) < TOLERANCE
    start_weights = runs.converted()[0].state_dict()
    assert far(start_weights, alone) > 100 * TOLERANCE  # it has learnt something meanwhile


@pytest.mark.slow
def test_what_was_trained_before_is_trained_by_two_as_by_one(tmp_path: Path) -> None:
    runs.many("again", tmp_path)
    alone = torch.load(tmp_path / "again-0.pt")
    together("again", tmp_path)
    first, second = (torch.load(tmp_path / f"again-{rank}.pt") for rank in (0, 1))
    assert far(first, second) == 0
    assert far(first, alone) < TOLERANCE


@pytest.mark.slow
def test_shards_train_as_one_and_come_together_in_a_file(
    tmp_path: Path, alone: dict[str, Any]
) -> None:
    together("shard", tmp_path)
    again = bp_convert.load(tmp_path / "shard.pt")
    assert far(again.state_dict(), alone) < TOLERANCE
    assert again(runs.data()[0]).shape == (200, 4)
    report = Trained.model_validate_json((tmp_path / "shard.json").read_text())
    assert report.after["loss"] < report.before["loss"]
    single = runs.many("one", tmp_path)
    assert report.after == pytest.approx(single.after, abs=1e-5)  # shared scores add up
    assert list((tmp_path / "run").glob("step-*.pt"))


@pytest.mark.slow
def test_shards_go_on_from_a_checkpoint_to_the_bit(tmp_path: Path) -> None:
    together("resumed", tmp_path)


def test_sharding_needs_processes() -> None:
    with pytest.raises(TrainingError, match="one process"):
        bp_convert.finetune(runs.plain(), runs.data(), shard=True)
