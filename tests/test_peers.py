"""The comparison with peers: equal parameters, equal shapes, and a page of it."""

from __future__ import annotations

import importlib.util
from functools import partial

import pytest
import torch
from torch import nn

from benchmarks import peers
from bp_convert.pages.page import html


@pytest.mark.parametrize("share", ["one", "0.25"])
@pytest.mark.parametrize(
    "dense", [nn.Linear(64, 96), nn.Conv2d(16, 32, 3, stride=2, padding=1)], ids=["linear", "conv"]
)
@pytest.mark.parametrize("who", peers.CONTENDERS)
def test_contenders_have_the_parameters_that_were_asked_for(
    who: str, dense: nn.Module, share: str
) -> None:
    package, make = peers.CONTENDERS[who]
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    params = peers.allowed(dense, share)
    assert params is not None
    made = make(dense, params)
    if made is None:
        assert isinstance(dense, nn.Conv2d)  # for which it has no layer
        return
    x = torch.randn(2, 64) if isinstance(dense, nn.Linear) else torch.randn(2, 16, 8, 8)
    assert made(x).shape == dense(x).shape
    if share == "0.25" and not package:  # the others round ranks in ways of their own
        count = sum(p.numel() for p in made.parameters()) - dense.bias.numel()  # type: ignore[union-attr, operator]
        assert abs(count - params) <= peers.OFF * params


def test_rows_of_a_case_and_their_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "interleaved", lambda passes, *_: [8.0, *[2.0] * (len(passes) - 1)])
    case = peers.Case("Linear", partial(nn.Linear, 64, 64), partial(peers._drawn, (64,)), (1, 4))
    found = list(peers.rows(case, "one", set(peers.PEERS)))
    assert {(one.batch, one.ratio) for one in found if one.who != "dense"} == {(1, 4.0), (4, 4.0)}
    page = html(peers.shown(found, (("machine", "a machine"),)))
    assert "ours, square pairs" in page
    assert "<svg" in page
    assert "a machine" in page


def test_of_a_model_all_layers_but_the_ends_are_replaced() -> None:
    net = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 4))
    case = peers.Case("net", lambda: net, partial(peers._drawn, (8,)), whole=True)
    made = peers.contender(case, net, "0.25", peers.low_rank)
    assert isinstance(made, nn.Sequential)
    assert [type(one).__name__ for one in made] == ["Linear", "Sequential", "Sequential", "Linear"]
    assert all(isinstance(one, nn.Linear) for one in net)
