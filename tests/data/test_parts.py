"""Which examples each part gets, that the same call gives the same, and how sources are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bp_convert.data import Uses, from_tensors, split_for
from bp_convert.data.factory import tensor_rows
from bp_convert.data.share import first_rows, last_rows, parted, shuffled
from bp_convert.graph.example import adapt
from bp_convert.values.settings import Settings
from tests.data.crafted import first_column, load_examples, numbered, refuses, scored, spec


def order(total: int, seed: int = 0) -> list[int]:
    """The permutation of a source of so many examples."""
    return shuffled(tensor_rows(torch.zeros(total, 1), None, (), "data", "data"), seed)


@pytest.mark.parametrize("total", [1, 2, 5, 10, 33])
@pytest.mark.parametrize("count", [1, 4, 10])
@pytest.mark.parametrize("seed", [0, 7])
def test_the_parts_never_meet(total: int, count: int, seed: int) -> None:
    first = first_rows(order(total, seed), count)
    assert len(set(first)) == min(total, count)
    if count >= total:
        assert not last_rows(order(total, seed), 4, len(first))
        with refuses("calibration has used"):
            scored(torch.zeros(total, 3), [spec("3")], taken=count, count=4, seed=seed)
        return
    for wanted in (1, 3, 100):
        last = last_rows(order(total, seed), wanted, len(first))
        assert not set(first) & set(last)
        assert len(set(last)) == min(wanted, total - len(first))


def test_what_is_held_out_makes_the_difference() -> None:
    assert set(first_rows(order(10), 6)) & set(last_rows(order(10), 6, 0))


def test_evaluation_takes_from_the_end_whatever_is_held_out() -> None:
    assert last_rows(order(100), 10, 20) == last_rows(order(100), 10, 60)


@pytest.mark.parametrize("total", [4, 11, 120, 1000])
@pytest.mark.parametrize("count", [2, 80, 512])
def test_what_training_needs_of_the_same_source_is_left_to_it(total: int, count: int) -> None:
    first = first_rows(order(total), count, 0.1)
    assert total - len(first) >= 0.1 * total
    assert len(first) == min(count, total - -(-total // 10))
    rest = total - len(first)
    last = last_rows(order(total), 2000, len(first), halved=True)
    assert not set(first) & set(last)
    assert len(last) == (rest + 1) // 2
    assert len(last_rows(order(total), count, 0, halved=True)) == min(count, (total + 1) // 2)


def test_the_choice_is_the_one_of_every_version() -> None:
    """Results and checkpoints depend on it."""
    assert first_rows(order(12, 3), 4) == [10, 9, 1, 6]
    assert last_rows(order(12, 3), 3, 4, halved=True) == [0, 8, 5]
    learnt, held = parted(12, 0.25, 5, "data", fitted={0, 1, 2}, scored={3})
    assert (learnt, held) == ([0, 1, 2, 4, 5, 6, 7, 8], [9, 10, 11])


def test_one_source_for_every_use_is_kept_apart(tmp_path: Path) -> None:
    """As a recipe does, whose full model and its conversions learn from what is also scored."""
    np.save(tmp_path / "x.npy", numbered(60, 3))
    source = str(tmp_path / "x.npy")
    uses = Uses(source, 10, evaluate=source, scored=20, learn=source, validation=0.2)
    settings = Settings(inputs=(spec("3"),))
    rows = {}
    for name, asked in (("full", replace(uses, fits=False)), ("converted", uses)):
        split = split_for(Plain(), asked, settings)
        rows[name] = [
            set() if one is None else set(one.rows or ())
            for one in (split.calibrate, split.train, split.validate, split.evaluate)
        ]
        calibrated, learnt, held, kept = rows[name]
        assert learnt | held | kept == set(range(60))
        assert not kept & (calibrated | learnt | held)
        assert not held & (calibrated | learnt)
    assert rows["full"][3] == rows["converted"][3]
    assert not rows["full"][0]
    with refuses("learnt from", "leave validation out"):
        split_for(Plain(), Uses(learn=source, validation=source), settings)


def test_examples_know_their_numbers_in_the_source(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", numbered(50, 3))
    found = load_examples(tmp_path / "x.npy", [spec("3")], count=10)
    assert found.rows is not None
    assert list(found.rows) == [int(one) for one in first_column(found)]
    assert load_examples([torch.zeros(4, 3)], [spec("3")]).rows is None


def test_the_same_call_gives_the_same_examples(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", numbered(50, 3))
    one = load_examples(tmp_path / "x.npy", [spec("3")], count=10)
    two = load_examples(tmp_path / "x.npy", [spec("3")], count=10)
    other = load_examples(tmp_path / "x.npy", [spec("3")], count=10, seed=1)
    assert first_column(one) == first_column(two)
    assert one.digest == two.digest
    assert one.digest != other.digest
    assert set(first_column(one)) != set(first_column(other))


def test_the_digest_covers_values_names_dtypes_shapes_and_labels() -> None:
    x = torch.zeros(4, 2)
    changed = x.clone()
    changed[3, 1] = 1
    digests = [
        from_tensors(x).digest,
        from_tensors(changed).digest,
        from_tensors(x.view(2, 4)).digest,
        from_tensors(x.to(torch.float64)).digest,
        from_tensors({"x": x}).digest,
        from_tensors(x, torch.zeros(4, dtype=torch.int64)).digest,
        from_tensors(x, torch.ones(4, dtype=torch.int64)).digest,
    ]
    assert len(set(digests)) == len(digests)
    assert from_tensors(x.clone()).digest == digests[0]


def test_bad_numbers_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", numbered(4, 3))
    for options in ({"count": 0}, {"batch": 0}):
        with refuses("at least 1"):
            load_examples(tmp_path / "x.npy", [spec("3")], **options)  # type: ignore[arg-type]


def test_unknown_sources_say_what_there_is(tmp_path: Path) -> None:
    with refuses("nothing with that path", "FILE.py:LOADER"):
        load_examples(tmp_path / "none.npy", [])
    with refuses("did you mean FashionMNIST"):
        load_examples("FashionMINST", [])
    (tmp_path / "x.csv").write_text("1,2")
    with refuses("unknown kind, .csv"):
        load_examples(tmp_path / "x.csv", [])


def test_options_are_checked(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", numbered(4, 3))
    with refuses("the option mean"):
        load_examples(f"{tmp_path}/x.npy?mean=1", [])
    with refuses("name=value"):
        load_examples(f"{tmp_path}/x.npy?mean", [])
    np.save(tmp_path / "what?.npy", numbered(4, 3))
    assert load_examples(f"{tmp_path}/what?.npy", []).count == 4


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Masked(Plain):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return x * self.weight


def test_models_get_what_they_accept() -> None:
    x, mask = torch.ones(3, 2), torch.ones(3, 2, dtype=torch.int64)
    args, kwargs = adapt(Plain().half(), (x,), {"attention_mask": mask, "other": mask})
    assert args[0].dtype == torch.float16
    assert set(kwargs) == {"other"}  # what is not optional stays, so that forward complains
    _, kwargs = adapt(Masked(), (x,), {"attention_mask": mask})
    assert set(kwargs) == {"attention_mask"}
    assert kwargs["attention_mask"].dtype == torch.int64


def test_models_get_a_copy() -> None:
    x = torch.ones(3, 2)
    args, _ = adapt(Plain(), (x,), {})
    args[0].zero_()
    assert bool((x == 1).all())
