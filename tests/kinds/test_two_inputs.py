"""nn.Bilinear, whose weight is a matrix on the outer product of two inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import bp_convert
from bp_convert.kinds import kind_of
from bp_convert.layers import BPBilinear
from bp_convert.seen.pick import Pick
from bp_convert.values.factors import FactorSpec
from tests.tolerances import assert_near

SPECS = [
    FactorSpec(out=out, inp=inp, rank=2)
    for out in ((1, 8), (2, 4), (8, 1))
    for inp in ((1, 30), (5, 6), (6, 5), (30, 1))
]


class Related(nn.Module):
    """Two encoded things, and how they relate."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 12), nn.Linear(6, 10)
        self.relate = nn.Bilinear(12, 10, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.relate(self.one(x).relu(), self.two(x).relu()).relu())
        return found


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_it_computes_what_its_weight_computes(spec: FactorSpec) -> None:
    layer = BPBilinear(5, 6, 8, factors=spec, dtype=torch.float64)
    dense = layer.to_dense()
    assert type(dense) is nn.Bilinear
    for lead in ((), (4,), (2, 3), (0,)):
        one, two = (torch.randn(*lead, n, dtype=torch.float64) for n in (5, 6))
        assert_near(layer(one, two), dense(one, two))
    layer(torch.randn(4, 5).double(), torch.randn(4, 6).double()).square().sum().backward()
    assert all(float(p.grad.abs().max()) > 0 for p in layer.parameters())  # type: ignore[union-attr]
    whole = BPBilinear.from_dense(dense, factors=spec.model_copy(update={"rank": spec.full_rank}))
    one, two = (torch.randn(4, n, dtype=torch.float64) for n in (5, 6))
    assert_near(whole(one, two), dense(one, two))
    with FlopCounterMode(display=False) as counter:
        layer.to("meta")(one.to("meta"), two.to("meta"))
    assert counter.get_total_flops() == 2 * 4 * BPBilinear.predict_macs(layer.factors, (5, 6))


def test_rows_are_what_its_matrix_multiplies() -> None:
    layer = nn.Bilinear(5, 6, 8, bias=False, dtype=torch.float64)
    kind = kind_of(layer)
    assert kind is not None
    one, two = (torch.randn(2, 7, n, dtype=torch.float64) for n in (5, 6))
    for given in (kind.given((one, two), {}), kind.given((), {"input1": one, "input2": two})):
        (rows,) = kind.rows(layer, given, Pick(10**9))["weight"]
        assert_near(rows @ layer.weight.flatten(1).t(), layer(one, two).flatten(0, 1))
    (some,) = kind.rows(layer, (one, two), Pick(5, 1))["weight"]
    assert len(some) == 5
    assert all(any(torch.equal(row, other) for other in rows) for row in some)


def test_its_multiply_adds_are_in_the_sum_though_torch_does_not_count_them() -> None:
    plan = bp_convert.plan(Related(), inputs=["6"], convert_anyway=True, rank=10**6)
    layer = plan.layer("relate")
    assert layer is not None
    assert layer.macs[0] == 12 * 10 * 16
    assert plan.macs is not None
    assert plan.macs.before == 6 * 12 + 6 * 10 + 12 * 10 * 16 + 16 * 5
    kept = bp_convert.plan(Related(), inputs=["6"], exclude=["relate"], rank=2)
    assert kept.macs is not None
    assert kept.macs.before == plan.macs.before
    assert kept.layer("relate").macs == (12 * 10 * 16,) * 2  # type: ignore[union-attr]


@torch.no_grad()
def test_a_model_is_converted_widened_and_turned_back() -> None:
    torch.manual_seed(0)
    model, x = Related().eval(), torch.randn(9, 6)
    small, _ = bp_convert.convert(model, inputs=["6"], rank=10**6, convert_anyway=True)
    assert isinstance(small.relate, BPBilinear)
    assert_near(small(x), model(x))
    assert_near(bp_convert.to_dense(small)(x), model(x))
    wide, report = bp_convert.convert(model, inputs=["6"], rank=10**6, alpha=2)
    assert report.plan.layer("relate").after == (24, 32)  # type: ignore[union-attr]
    assert (wide.relate.in1_features, wide.relate.in2_features) == (24, 10)
    assert_near(wide(x), model(x))


@torch.no_grad()
def test_a_target_is_met_on_data() -> None:
    torch.manual_seed(0)
    model, data = Related().eval(), torch.randn(256, 6)
    held = sum(p.numel() for p in model.parameters())
    gaps = []
    for given in (data, None):
        small, _ = bp_convert.convert(model, inputs=["6"], target="params=0.4", calibrate=given)
        assert isinstance(small.relate, BPBilinear)
        assert sum(p.numel() for p in small.parameters()) <= 0.4 * held
        gaps.append(float((small(data) - model(data)).square().mean()))
    assert gaps[0] < gaps[1]
