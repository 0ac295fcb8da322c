from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from bp_convert.errors import PlanError
from bp_convert.kinds import Ask, kind_of, predict
from bp_convert.prices import current, priced, shipped
from bp_convert.tuning import layer_grid, price_fit, tuner
from bp_convert.tuning.layer_grid import GridCase
from bp_convert.tuning.machine_table import Host, read_table, read_times, write_table, write_times
from bp_convert.values.progress import unheard

HOST = Host("cpu", 1, "float32")
CASES = [
    GridCase(partial(nn.Linear, inputs, outputs), (rows, inputs))
    for inputs, outputs in ((24, 36), (48, 16), (64, 64))
    for rows in (1, 7)
]


def clock(passes: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    """Take 3 microseconds a layer, and 2 more for each 100 of its numbers."""
    numbers = [sum(p.numel() for p in one.func.parameters()) for one in passes]  # type: ignore[attr-defined]
    return [3 + 0.02 * many for many in numbers]


def test_prices_are_those_that_times_were_made_of() -> None:
    samples = [one for case in CASES for one in tuner.timed(case, HOST, clock)]
    assert len(samples) >= 3 * len(CASES)
    found = price_fit.fit(samples)
    assert set(found) == {"Linear.dense", "Linear.twin"}
    for one in samples:
        # Biases are no part of what is counted.
        assert one.told(found)[0] == pytest.approx(one.times[0], rel=0.2)
    assert price_fit.off(found, samples) < 0.15
    assert price_fit.off({name: {} for name in found}, samples) == 1


def test_a_fit_finds_its_prices() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(30, 2, generator=generator) + 0.1
    samples = [({"a": float(a), "b": float(b)}, 3 * float(a) + 7 * float(b)) for a, b in rows]
    found = price_fit.prices(samples)
    assert found == pytest.approx({"a": 3, "b": 7})


def test_kinds_that_were_not_timed_keep_their_prices_at_the_scale_of_the_machine() -> None:
    def slow(passes: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
        return [10 * one for one in as_shipped(passes)]

    def as_shipped(passes: Sequence[Callable[[], Any]]) -> list[float]:
        dense, *twins = (one.func for one in passes)  # type: ignore[attr-defined]
        kind = kind_of(dense)
        if kind is None:  # inner widths
            return [1.0] * len(passes)
        shape = tuple(passes[0].args[0].shape)  # type: ignore[attr-defined]
        found = [
            predict(kind, dense, kind.widths(dense), {"weight": one.factors}, [shape])
            for one in twins
        ]
        assert found[0] is not None
        return [found[0].dense, *(one.converted for one in found if one is not None)]

    table = tuner.measured(HOST, unheard, cases=CASES, clock=slow)
    before = shipped()
    assert table.prices["LSTM.dense"]["macs"] == pytest.approx(10 * before["LSTM.dense"]["macs"])
    assert table.off < 0.05


def test_tuning_ends_in_time_and_has_some_of_every_family() -> None:
    seen: list[str] = []
    cases = layer_grid.grid()
    for case in cases[:12]:
        seen.append(type(case.make()).__name__)
    assert {"Linear", "Conv2d", "Embedding", "LSTM", "LSTMCell"} <= set(seen)
    asked = tuner.measured(HOST, unheard, cases=CASES, seconds=0.0, clock=_never)
    assert asked.prices.keys() == shipped().keys()


def _never(passes: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    raise AssertionError("no time is left")


def test_low_rank_is_among_what_is_timed() -> None:
    for layer in (nn.Linear(64, 48), nn.Conv2d(16, 24, 3), nn.LSTM(32, 16)):
        kind = kind_of(layer)
        assert kind is not None
        found = layer_grid.factorings(kind, layer, kind.widths(layer))
        flat = [one for one in found if all(s.out[1] == s.inp[0] == 1 for s in one.values())]
        assert flat
        assert len(found) > len(flat)


def test_what_was_measured_is_known_again_and_by_its_place_alone() -> None:
    table = tuner.measured(HOST, unheard, cases=CASES, clock=clock)
    assert read_table(HOST) is None
    write_table(table)
    again = read_table(HOST)
    assert again is not None
    assert again.prices == table.prices
    for other in (Host("cpu", 2, "float32"), Host("cpu", 1, "bfloat16"), Host("cuda", 1)):
        assert read_table(other) is None


def test_new_prices_forget_the_times_of_models() -> None:
    place = Host("cpu", 3, "float32")
    write_times(place, "key", {"": 5.0})
    assert read_times(place, "key") == {"": 5.0}
    assert read_times(place, "other") is None
    write_table(tuner.measured(place, unheard, cases=CASES, clock=clock))
    assert read_times(place, "key") is None


def test_prices_hold_for_a_while() -> None:
    layer = nn.Linear(64, 64)
    kind = kind_of(layer)
    assert kind is not None
    factors = kind.factor(layer, (64, 64), Ask(rank=2))

    def ratio() -> float:
        found = predict(kind, layer, (64, 64), factors, [(5, 64)])  # type: ignore[arg-type]
        assert found is not None
        return found.ratio

    before = ratio()
    with priced({"Linear.dense": {"calls": 50.0}, "Linear.twin": {"calls": 10.0}}):
        assert ratio() == pytest.approx(5)
        assert current()["LSTM.dense"] == shipped()["LSTM.dense"]
    assert ratio() == before


@pytest.mark.parametrize(("multiple", "step"), [(8, 8.0), (16, 16.0), (1, None)])
def test_the_multiple_that_is_faster_is_seen(multiple: int, step: float | None) -> None:
    def stairs(passes: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
        inner = [one.func[0].out_features for one in passes]  # type: ignore[attr-defined]
        return [-(-one // multiple) * multiple * (1.2 if one % multiple else 1.0) for one in inner]

    assert tuner.aligned(HOST, stairs).get("aligned", {}).get("step") == step


@pytest.mark.parametrize("asked", [{"device": "cuda:99"}, {"device": "tpu"}, {"dtype": "int8"}])
def test_what_cannot_be_timed_is_told(asked: dict[str, str]) -> None:
    with pytest.raises(PlanError, match="timed on here"):
        tuner.tune(**asked)  # type: ignore[arg-type]
