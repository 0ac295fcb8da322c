from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
from torch import nn

from bp_convert.graph.walk import walk
from bp_convert.kinds import predict
from bp_convert.search.allocate import ERROR, loss, squared_error
from bp_convert.search.pace import AS_FAST, NEARLY, Choice, paced
from bp_convert.search.units import FreeLayer, Unit
from bp_convert.values.factors import FactorSpec
from bp_convert.values.literals import Prefer
from tests.search.units import made_up


def _units(errors: list[float], times: list[float], params: list[float]) -> list[Unit]:
    costs = {"params": params, "time": times, "time32": times}
    return [made_up(errors, **costs) for _ in range(3)]


def _run(units: list[Unit], prefer: Prefer, best: int = 1) -> tuple[float, float, bool]:
    """Return the loss and the time of a choice, and whether it is slower."""
    found, _, slower = paced(Choice(units, [best] * 3), {"params": 30.0}, prefer)
    return found.sum(ERROR), found.sum("time"), slower


@pytest.mark.parametrize("prefer", ["quality", "balanced", "speed"])
@pytest.mark.parametrize("more", [0.0, 0.01, 0.06, 0.5, 1.1, 1.5])
def test_error_is_given_for_time_at_the_rate_that_is_told(prefer: Prefer, more: float) -> None:
    """All three at the faster option, or none: an option that errs by ``more`` and takes half."""
    units = _units([0, 0.01, 0.01 * (1 + more)], [100, 100, 10], [50, 10, 10])
    taken, time, _ = _run(units, prefer)
    start = 3 * float(loss(0.01))
    assert taken <= NEARLY[prefer] * start * (1 + 1e-9)
    fits = sum(
        float(loss(0.01 * (1 + more))) * n + float(loss(0.01)) * (3 - n) <= NEARLY[prefer] * start
        for n in (1, 2, 3)
    )
    # The shares of the time that are tried are a tenth apart at most.
    assert (time < 300) == (fits > 0)
    if prefer == "speed":
        assert time <= 300 - 90 * fits + 30


def test_speed_costs_at_most_half_as_much_error_again() -> None:
    for total in (0.01, 0.5, 2.0):
        most = sqrt(squared_error(AS_FAST["speed"] * total)) / sqrt(squared_error(total))
        assert most <= 1.5 + 1e-9


def test_what_is_slower_is_given_up_for_a_tenth_of_the_loss_and_not_for_more() -> None:
    for more, prefer, slower in (
        (0.05, "balanced", False),
        (0.2, "balanced", True),
        (0.05, "quality", True),
        (0.2, "speed", False),
    ):
        units = _units([0, 0.01, 0.01 * (1 + more)], [100, 140, 90], [50, 10, 10])
        assert _run(units, prefer)[2] is slower  # type: ignore[arg-type]


def test_balanced_spends_the_target_and_speed_need_not() -> None:
    units = _units([0, 0.01, 0.0101], [100, 100, 50], [50, 10, 5])
    assert _run(units, "balanced")[1] == 300
    assert _run(units, "speed")[1] == 150


@pytest.mark.parametrize("prefer", ["quality", "balanced", "speed"])
@pytest.mark.parametrize(("more", "macs"), [(0.0, 180), (0.01, 180), (0.05, 660), (0.5, 900)])
def test_of_what_is_as_fast_the_fewest_multiply_adds_are_taken(
    prefer: Prefer, more: float, macs: float
) -> None:
    """As where weights are built once: time is the same whatever they are built of."""
    costs = {"params": [50, 10, 10], "time": [100] * 3, "time32": [100] * 3, "macs": [100, 300, 60]}
    units = [made_up([0, 0.01, 0.01 * (1 + more)], **costs) for _ in range(3)]
    found, _, _ = paced(Choice(units, [1] * 3), {"params": 30.0}, prefer)
    start = 3 * float(loss(0.01))
    assert found.sum(ERROR) <= (1.0 if prefer == "quality" else 1.02) * start * (1 + 1e-9)
    assert found.sum("macs") == (900 if prefer == "quality" and more else macs)


def test_a_role_of_a_recurrent_layer_counts_its_share_of_the_faster_path() -> None:
    """With like shares in every role the roles' times add up to what is predicted of the layer."""
    (site,) = walk(nn.Sequential(nn.LSTM(1500, 1500)))
    widths = site.kind.widths(site.module)
    layer = FreeLayer(site, widths, ([(20, 1, 1500)], [(20, 32, 1500)]), 1)
    spec = FactorSpec.model_validate({"out": (6000, 1), "in": (1, 1500), "rank": 150})
    roles = [layer.role_times(role, spec, 6000 * 1500) for role in ("ih_l0", "hh_l0")]
    factors = {"ih_l0": spec, "hh_l0": spec}
    for place, shapes in enumerate(layer.shapes):
        whole = predict(site.kind, site.module, widths, factors, shapes)
        assert whole is not None
        assert np.isclose(sum(one[place] for one in roles), whole.converted)
    assert sum(one[0] for one in roles) < 0.9 * layer.times(factors)[0][0]
