"""Plain int8 beside a conversion: told where it takes no more bytes and is nearer."""

import copy

import pytest
import torch
from torch import nn

import bp_convert


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128)).eval()


def test_half_of_the_parameters_is_more_than_int8_takes() -> None:
    model = _model()
    before = copy.deepcopy(model.state_dict())
    _, report = bp_convert.convert(model, target="params=0.5", inputs=["64"])
    plain = report.plain_int8
    assert plain is not None
    numbers, rows, biases = 64 * 128 + 128 * 128, 256, 256
    assert plain.bytes == numbers + 2 * rows + 4 * biases
    args = torch.randn(64, 64)
    rounded = bp_convert.convert(model, target="params=1", store="int8", inputs=["64"])[0]
    with torch.no_grad():
        gap = (rounded(args) - model(args)).norm() / model(args).norm()
    assert 0.3 * float(gap) < plain.output_error < 3 * float(gap)
    assert "plain int8 serves better" in report.verdict
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_nothing_is_said_where_int8_takes_more_or_is_no_nearer() -> None:
    model = _model()
    _, small = bp_convert.convert(model, target="params=0.2", inputs=["64"])
    assert small.plain_int8 is None
    _, shared = bp_convert.convert(model, rank=0.5, convert_anyway=True, inputs=["64"])
    assert shared.plain_int8 is None
    _, bits = bp_convert.convert(model, target="params=0.5", store="int4", inputs=["64"])
    assert bits.plain_int8 is None


def test_half_precision_adds_nothing_to_what_rounding_to_int8_costs() -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = _model().to(torch.bfloat16).to(dtype)  # the same weights
        _, report = bp_convert.convert(model, target="params=0.6", inputs=["64"])
        assert report.plain_int8 is not None
        found.append(report.plain_int8.output_error)
    assert found[1] == pytest.approx(found[0], rel=1e-3)
