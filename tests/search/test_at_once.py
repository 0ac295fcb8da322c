"""Layers searched at once: what comes first, what fails, and that plans stay the same."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import bp_convert
from bp_convert.errors import FactorError
from bp_convert.search import candidates
from bp_convert.search.at_once import at_once
from tests.search.models import cnn, examples, images, mlp, spec


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_others_of_a_group_wait_for_its_first() -> None:
    lock, ended, seen, done = threading.Lock(), set[str](), [], list[int]()

    def job(name: str, needs: str = "") -> None:
        with lock:
            seen.append((needs in ended or not needs, torch.get_num_threads()))
        assert not torch.is_grad_enabled()
        with lock:
            ended.add(name)

    groups = [
        [lambda: job("a"), *(lambda i=i: job(f"a{i}", "a") for i in range(5))],
        [lambda: job("b"), *(lambda i=i: job(f"b{i}", "b") for i in range(5))],
    ]
    at_once(groups, done.append)
    assert len(ended) == 12
    assert seen == [(True, 1)] * 12
    assert done == sorted(done)
    assert done[-1] == 12
    assert torch.get_num_threads() == 2
    assert torch.is_grad_enabled()


def test_what_fails_is_told_and_the_rest_is_left() -> None:
    ran = []

    def fails() -> None:
        raise ValueError("not finite")

    with pytest.raises(ValueError, match="not finite"):
        at_once([[fails, lambda: ran.append(1)]])
    assert not ran
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("by_data", [False, True], ids=["weights", "data"])
def test_a_plan_is_the_same_at_once_and_one_by_one(
    by_data: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = []
    held = examples(images(64)) if by_data else None
    for large in (candidates.LARGE, 0):  # of nothing, so that all are searched alone
        monkeypatch.setenv("BP_CONVERT_CACHE", str(tmp_path / str(large)))
        monkeypatch.setattr(candidates, "LARGE", large)
        torch.manual_seed(0)
        for model, one, data in (
            (mlp(48, 60, 60, 60, 10), spec(48), None),
            (cnn(), spec(3, 12, 12), held),
        ):
            plan = bp_convert.plan(
                model, target="params=0.4", inputs=(one,), calibrate=data, convert_anyway=True
            )
            plans.append(plan.model_dump_json())
    assert plans[:2] == plans[2:]


def test_weights_that_are_not_finite_are_named() -> None:
    model = mlp(48, 60, 60, 60, 10)
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan")
    with pytest.raises(FactorError, match="finite"):
        bp_convert.plan(model, target="params=0.4", inputs=(spec(48),))
