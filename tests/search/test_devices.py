"""A model on another device: what is searched, tried and fitted computes on the CPU, and nothing
mixes the two by accident."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert.calibration.gatherer import Gatherer, Moments, Order
from bp_convert.fitting.sequence import _fit
from bp_convert.graph.clone import clone
from bp_convert.graph.walk import Site, walk
from bp_convert.kinds import Factors, Spread
from bp_convert.kron.compute import DEVICE, DTYPE, to_compute
from bp_convert.planner import requests
from bp_convert.search import cache
from bp_convert.search.candidates import Candidates
from bp_convert.search.selection import Allocation, choose
from bp_convert.search.units import FreeLayer, Unit
from bp_convert.spending.budget import budget_for
from bp_convert.values.target import Target
from tests.foreign import HERE, THERE, Abroad, Foreign, abroad_
from tests.search.models import examples, falling_


class Every(nn.Module):
    """A layer of each kind, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 12, padding_idx=0)
        self.wave = nn.Conv1d(12, 12, 3, padding=1)
        self.image = nn.Conv2d(1, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.volume = nn.Conv3d(1, 4, (1, 3, 3), padding=(0, 1, 1))
        self.state = nn.LSTM(96, 16, bidirectional=True, batch_first=True)
        self.head = nn.Linear(32, 10)
        falling_(self)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wave(self.words(tokens).transpose(1, 2))  # (N, 12, T)
        y = self.norm(self.image(x[:, None]))  # (N, 8, 12, T)
        z = self.volume(y[:, None]).mean(1)  # (N, 8, 12, T)
        return self.head(self.state(z.flatten(1, 2).transpose(1, 2))[0].mean(1))


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No curves of an earlier run, and none of CUDA's own libraries."""
    monkeypatch.setattr(cache, "read", lambda _: None)
    with torch.backends.cudnn.flags(enabled=False):
        yield


def _model(device: torch.device) -> nn.Module:
    torch.manual_seed(5)
    model = Every().eval()
    return abroad_(model) if device == THERE else model


def _tokens() -> Tensor:
    return torch.randint(0, 60, (40, 9), generator=torch.Generator().manual_seed(1))


def _wanted(model: nn.Module) -> list[FreeLayer]:
    return [FreeLayer(one, one.kind.widths(one.module), ((), ()), 0) for one in walk(model)]


def _searched(device: torch.device, *, by_data: bool) -> tuple[list[Unit], Allocation]:
    model = _model(device)
    wanted = _wanted(model)
    data = examples(_tokens())
    batches = data.batches if by_data else ()
    method: Any = "kron-data" if by_data else "kron"
    units = Candidates(model, wanted, method, batches, data.digest).units()
    return units, choose(units, [Target.parse("params=0.4")], budget_for(model, wanted, {}, None))


@pytest.mark.slow
@pytest.mark.parametrize("by_data", [False, True], ids=["weights", "data"])
def test_a_model_elsewhere_is_searched_as_one_here(by_data: bool) -> None:
    here, chosen = _searched(HERE, by_data=by_data)
    with Abroad():
        there, found = _searched(THERE, by_data=by_data)
    assert len(here) == len(there) == 7  # an LSTM has two roles
    for one, two in zip(here, there, strict=True):
        assert [c.spec for c in one.curves] == [c.spec for c in two.curves]
        for mine, theirs in zip(one.curves, two.curves, strict=True):
            np.testing.assert_allclose(mine.errors, theirs.errors, rtol=1e-4, atol=1e-6)
        assert one.sensitivity == pytest.approx(two.sensitivity, rel=1e-3)
    assert chosen.factors == found.factors
    assert chosen.factors


def _gathered(model: nn.Module, sites: list[Site]) -> Moments:
    """Gather what each layer gets, without what else runs a model on data."""
    names = [site.name for site in sites]
    seen: dict[str, list[Any]] = {}
    handles = [
        site.module.register_forward_pre_hook(
            lambda _, args, name=site.name: seen.setdefault(name, []).append(args[0])
        )
        for site in sites
    ]
    with torch.no_grad():
        model(_tokens().to(next(model.parameters()).device))
    for handle in handles:
        handle.remove()
    order = Order(dict.fromkeys(names, 1), [[name] for name in names], frozenset(["image"]))
    gatherer = Gatherer(sites, order, 40, cross=True)
    gatherer.add(seen, 0, (_tokens(), {}), seen)
    return gatherer.result()


def _fitted(device: torch.device, factors: dict[str, Factors]) -> dict[str, Tensor]:
    model = _model(device)
    sites = [site for site in walk(model) if site.name in factors]
    converted = clone(model)
    for site in sites:
        widths = site.kind.widths(site.module)
        twin = site.kind.build(site.module, widths, factors[site.name], device)
        assert {p.device for p in twin.parameters()} == {device}
        site.kind.fill(site.module, twin, Spread())
        site.kind.carry(site.module, twin)
        setattr(converted, site.name, twin)
    moments = _gathered(model, sites)
    with torch.no_grad():
        for site in sites:
            error = _fit(site, converted, moments)
            assert 0 < error < 1
        assert all(t.device == device for t in converted.state_dict().values() if t.dim())
        converted(_tokens().to(device))
    return {name: t.cpu().clone() for name, t in converted.state_dict().items()}


def test_a_model_elsewhere_is_fitted_as_one_here() -> None:
    _, chosen = _searched(HERE, by_data=True)
    factors = {**_first_options(), **chosen.factors}
    assert set(factors) == {"words", "wave", "image", "volume", "state", "head"}
    here = _fitted(HERE, factors)
    with Abroad():
        there = _fitted(THERE, factors)
    assert here.keys() == there.keys()
    for name, tensor in here.items():
        torch.testing.assert_close(there[name], tensor, rtol=1e-3, atol=1e-4)


def _first_options() -> dict[str, Factors]:
    """Return low-rank factors of half the rank for every layer."""
    found: dict[str, Factors] = {}
    for one in _wanted(_model(HERE)):
        choices = one.site.kind.choices(one.site.module, one.widths)
        specs = {
            role: next(s for s in choice.specs() if s.out[1] == 1 and s.inp[0] == 1)
            for role, choice in choices.items()
        }
        found[one.site.name] = {
            role: spec.model_copy(update={"rank": max(1, spec.full_rank // 2)})
            for role, spec in specs.items()
        }
    return found


def test_where_it_computes_is_said_in_one_place() -> None:
    assert torch.device("cpu") == DEVICE
    assert torch.float32 == DTYPE
    tensor = torch.randn(3)
    assert to_compute(tensor).data_ptr() == tensor.data_ptr()
    assert to_compute(nn.Parameter(tensor)).requires_grad is False
    assert to_compute(tensor.half()).dtype == torch.float32
    with Abroad():
        moved = to_compute(tensor.to(THERE))
        assert not isinstance(moved, Foreign)
        assert moved.device == HERE


def test_the_other_device_refuses_what_cuda_refuses() -> None:
    """The negative twins: each of these has stood in the search or the fits."""
    with Abroad():
        away = torch.randn(3, 3).to(THERE)
        assert away.device == THERE
        assert (away @ away).device == THERE
        assert torch.zeros(2, device=THERE).device == THERE
        assert (away + torch.tensor(1.0)).device == THERE
        assert away[torch.tensor([0, 2])].device == THERE
        assert isinstance(away.cpu(), Tensor)
        assert not isinstance(away.cpu(), Foreign)
        for mixed in (
            lambda: away @ torch.eye(3),
            lambda: torch.linalg.solve(torch.eye(3), away),
            lambda: torch.randn(3, 3).add_(away),
            lambda: away.index_select(0, torch.tensor([0])),
            lambda: torch.cat([away, torch.zeros(1, 3)]),
        ):
            with pytest.raises(RuntimeError, match="two devices"):
                mixed()
        with pytest.raises(TypeError, match="numpy"):
            away.numpy()
        here = torch.zeros(3, 3)
        assert here.copy_(away) is here
        assert here.device == HERE


@pytest.mark.slow
@pytest.mark.parametrize("by_data", [False, True], ids=["weights", "data"])
def test_a_conversion_end_to_end(by_data: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # The device is played by a subclass of Tensor, for which alone layers would be kept.
    monkeypatch.setattr(requests, "structural_reasons", lambda *_, **__: {})
    model = _model(THERE)
    asked: dict[str, Any] = {"calibrate": examples(_tokens())} if by_data else {}
    with Abroad():
        small, report = bp_convert.convert(
            model, target="params=0.5", inputs=["int64:1x9<60"], **asked
        )
        assert all(p.device == THERE for p in small.parameters())
        assert report.plan.params.ratio <= 0.5
