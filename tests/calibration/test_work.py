"""Fewer examples where passes over all of them would take long."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import bp_convert
from bp_convert.calibration import work
from bp_convert.calibration.work import passes_over, within
from bp_convert.graph.tree import rows_in

CPU = torch.device("cpu")


def _batches(count: int = 4, rows: int = 32) -> list[tuple[tuple[torch.Tensor], dict[str, object]]]:
    return [((torch.full((rows, 3), float(n)),), {}) for n in range(count)]


def _rows(batches: object) -> list[int]:
    return [rows_in(one) for one in batches]  # type: ignore[attr-defined]


def test_as_many_examples_as_the_work_is_enough_for() -> None:
    ones = _batches()
    assert _rows(within(ones, 0, 1.0, CPU)) == [32] * 4  # not known what one takes
    assert _rows(within(ones, 1.0, 128, CPU)) == [32] * 4
    assert _rows(within(ones, 1.0, 127, CPU)) == [32, 32, 32, 31]
    assert _rows(within(ones, 1.0, 64, CPU)) == [32, 32]
    assert _rows(within(ones, 1e9, 1.0, CPU)) == [8]
    assert _rows(within(ones, 1.0, 6, torch.device("cuda"))) == [32, 32, 32, 24]
    assert torch.equal(within(ones, 1.0, 40, CPU)[1][0][0], ones[1][0][0][:8])


def test_a_batch_is_not_cut_where_its_rows_are_no_examples() -> None:
    ones = [((torch.zeros(32, 3), torch.zeros(5, 32)), {})]
    assert _rows(within(ones, 1.0, 8, CPU)) == [32]


def test_lists_of_pictures_are_cut_as_lists_and_objects_looked_into() -> None:
    pictures = [(([torch.zeros(3, 4, 5) for _ in range(3)],), {}) for _ in range(3)]
    few = within(pictures, 1.0, 8, CPU)  # the last batch has as many examples as each has channels
    assert [[tuple(one.shape) for one in batch[0][0]] for batch in few] == [
        *[[(3, 4, 5)] * 3] * 2,
        [(3, 4, 5)] * 2,
    ]
    edges = SimpleNamespace(nodes=torch.zeros(32, 3), edges=torch.zeros(2, 70))
    assert within([((edges,), {})], 1.0, 8, CPU)[0][0][0] is edges


def test_fewer_stages_come_before_fewer_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = _batches(8)
    monkeypatch.setattr(work, "FIT", 256 * 12.0)
    assert passes_over(ones, 1.0, 24, 8, CPU) == (24, ones)
    stages, few = passes_over(ones, 2.0, 24, 8, CPU)
    assert (stages, sum(_rows(few))) == (12, 256)
    stages, few = passes_over(ones, 6.0, 24, 8, CPU)
    assert (stages, sum(_rows(few))) == (8, 128)


def test_a_plan_says_that_fewer_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 24)).eval()
    data = torch.randn(256, 24)
    asked = {"target": "params=0.5", "reconstruct": "off", "convert_anyway": True}
    whole = bp_convert.plan(model, calibrate=data, **asked)
    assert not any("layers are fitted to" in note for note in whole.notes)
    monkeypatch.setattr(work, "FIT", 1.0)
    few = bp_convert.plan(model, calibrate=data, **asked)
    assert any("layers are fitted to 64 of the" in note for note in few.notes)
    small = bp_convert.apply(model, few, calibrate=data)
    with torch.no_grad():
        gap = (small(data) - model(data)).norm() / model(data).norm()
    assert gap < 0.9
