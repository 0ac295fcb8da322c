"""Targets through the planner: met from below, spent, and the same every time."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert import storage
from bp_convert.data import Examples
from bp_convert.errors import PlanError
from bp_convert.kinds import Spread, kind_of
from bp_convert.kinds.recurrent_kind import LSTMKind
from bp_convert.kron.contract import bilinear_macs
from bp_convert.models import build
from bp_convert.planner import prepare
from bp_convert.search import units
from bp_convert.surgery import apply_plan
from bp_convert.values.factors import FactorSpec
from bp_convert.values.plan import Plan
from bp_convert.values.settings import LayerRule, Pairs, Settings
from bp_convert.values.target import Target
from tests.search.models import Words, cnn, examples, images, mlp, spec, vectors


def _plan(model: nn.Module, *targets: str, data: Examples | None = None, **asked: Any) -> Plan:
    asked.setdefault("convert_anyway", True)
    settings = Settings(target=tuple(map(Target.parse, targets)), **asked)
    return prepare(model, settings, examples=data).plan


def _mlp() -> tuple[nn.Module, dict[str, Any], Examples]:
    return mlp(48, 60, 72, 40, 10), {"inputs": (spec(48),)}, examples(vectors(200, 48))


def _cnn() -> tuple[nn.Module, dict[str, Any], Examples]:
    return cnn(), {"inputs": (spec(3, 12, 12),)}, examples(images(64))


def _words() -> tuple[nn.Module, dict[str, Any], Examples]:
    tokens = torch.randint(1, 90, (40, 9))
    return Words(), {}, examples(tokens)


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any], Examples]]] = {
    "mlp": _mlp,
    "cnn": _cnn,
    "words": _words,
}
EVERY = pytest.mark.parametrize("name", MODELS)
BY_DATA = pytest.mark.parametrize("by_data", [False, True], ids=["weights", "data"])


@EVERY
@BY_DATA
@pytest.mark.parametrize("share", [0.75, 0.2])
def test_a_share_of_the_parameters_is_met_and_spent(name: str, by_data: bool, share: float) -> None:
    model, asked, data = MODELS[name]()
    plan = _plan(model, f"params={share}", data=data if by_data else None, **asked)
    before = sum(p.numel() for p in model.parameters())
    assert plan.params.before == before
    assert plan.params.after <= share * before
    assert plan.params.after >= 0.9 * share * before
    done = apply_plan(model, plan).model
    assert sum(p.numel() for p in done.parameters()) == plan.params.after
    assert plan.error is not None
    assert 0 < plan.error < 10
    for layer in plan.layers:
        assert layer.action == "kept" or layer.error is not None


def test_nearly_all_of_a_budget_is_spent_where_options_are_fine() -> None:
    model = mlp(256, 320, 384, 256, 64)
    for share in (0.5, 0.25, 0.1):
        plan = _plan(model, f"params={share}", inputs=(spec(256),))
        assert 0.99 * share <= plan.params.ratio <= share


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize("share", [0.6, 0.3])
def test_a_share_of_the_multiply_adds_is_met_and_spent(name: str, share: float) -> None:
    model, asked, _ = MODELS[name]()
    plan = _plan(model, f"macs={share}", **asked)
    assert plan.macs is not None
    assert 0.85 * share <= plan.macs.ratio <= share


@pytest.mark.slow
@EVERY
@pytest.mark.parametrize("share", [0.8, 0.5])
def test_a_file_is_no_larger_than_asked(name: str, share: float, tmp_path: Path) -> None:
    model = {
        "mlp": lambda: mlp(256, 320, 256, 10),
        "cnn": lambda: cnn(48),
        "words": lambda: nn.Sequential(nn.Embedding(2000, 60), nn.LSTM(60, 40)),
    }[name]()
    asked = {"mlp": (spec(256),), "cnn": (spec(3, 12, 12),), "words": ()}[name]
    size = sum(p.numel() * 4 for p in model.parameters())
    texts = (f"size={share}", f"size={int(share * size)}b")
    for text, store in product(texts, ("fp32", None)):  # None: whatever bits lose least
        plan = _plan(model, text, inputs=asked, store=store)
        done = bp_convert.apply(model, plan)
        path = tmp_path / f"{text[:7]}.safetensors"
        storage.save(done, path)
        total = sum(f.stat().st_size for f in tmp_path.iterdir() if f.stem == path.stem)
        limit = share * size * 1.01 if text.endswith("b") else share * (size * 1.02)
        assert total <= limit
        assert total >= (0.9 if store else 0.5) * share * size
        for file in tmp_path.iterdir():
            file.unlink()


def test_several_targets_are_all_met() -> None:
    model, asked, data = _cnn()
    alone = {text: _plan(model, text, data=data, **asked) for text in ("params=0.4", "macs=0.3")}
    both = _plan(model, "params=0.4", "macs=0.3", data=data, **asked)
    assert both.macs is not None
    assert both.params.ratio <= 0.4
    assert both.macs.ratio <= 0.3
    macs = alone["params=0.4"].macs
    assert macs is not None
    assert macs.ratio > 0.3 or alone["macs=0.3"].params.ratio > 0.4
    assert both.error is not None
    assert both.error >= max(one.error or 0 for one in alone.values()) * 0.99
    tight = _plan(model, "size=0.5", "params=0.2", "error=0.99", data=data, **asked)
    assert tight.params.ratio <= 0.2
    assert (tight.error or 9) <= 0.99


@BY_DATA
def test_an_error_is_kept_with_as_few_parameters_as_do(by_data: bool) -> None:
    model, asked, data = _mlp()
    held = data if by_data else None
    shares = []
    for error in (0.05, 0.2, 0.5):
        plan = _plan(model, f"error={error}", data=held, **asked)
        assert plan.error is not None
        assert plan.error <= error * 1.005
        shares.append(plan.params.ratio)
        # With as many parameters the error is no smaller.
        same = _plan(model, f"params={plan.params.after}", data=held, **asked)
        assert same.error is not None
        assert same.error >= 0.85 * plan.error
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 1.3 * shares[-1]


@EVERY
def test_more_room_is_never_a_larger_error(name: str) -> None:
    model, asked, _ = MODELS[name]()
    errors = [_plan(model, f"params={share}", **asked).error for share in (0.2, 0.4, 0.6, 0.9)]
    assert errors == sorted(errors, key=lambda e: -(e or 0))


@EVERY
@pytest.mark.parametrize("share", [0.6, 0.2])
def test_at_equal_parameters_no_layer_is_worse_than_its_truncated_svd(
    name: str, share: float
) -> None:
    model, asked, _ = MODELS[name]()
    plan = _plan(model, f"params={share}", **asked)
    assert plan.converted
    for layer in plan.converted:
        module = model.get_submodule(layer.name)
        kind = kind_of(module)
        assert kind is not None
        worst = 0.0
        for role, matrices in kind.matrices(module, Spread()).items():
            gap = total = 0.0
            for matrix in matrices:
                rank = layer.factors[role].params // sum(matrix.shape)
                squares = torch.linalg.svdvals(matrix.detach().double()).square()
                gap += float(squares[rank:].sum())
                total += float(squares.sum())
            worst = max(worst, (gap / total) ** 0.5)
        assert layer.error is not None
        assert layer.error <= worst * 1.01 + 1e-4


def test_the_estimated_errors_are_those_that_conversion_has() -> None:
    model, asked, _ = _mlp()
    plan = _plan(model, "params=0.3", **asked)
    done = apply_plan(model, plan)
    for layer in plan.converted:
        assert layer.error == pytest.approx(done.errors[layer.name], rel=0.01)


def test_kronecker_sums_beat_svd_and_data_beats_weights() -> None:
    model, asked, data = _mlp()
    errors = {
        method: _plan(model, "params=0.2", data=data, method=method, **asked).error or 0
        for method in ("svd-data", "kron-data")
    }
    assert errors["kron-data"] <= errors["svd-data"] * 1.01
    for method in ("svd", "svd-data"):
        plan = _plan(model, "params=0.2", data=data, method=method, **asked)
        for layer in plan.converted:
            assert layer.factors["weight"].out[1] == layer.factors["weight"].inp[0] == 1
    svd = _plan(model, "params=0.2", method="svd", **asked).error or 0
    assert (_plan(model, "params=0.2", method="kron", **asked).error or 9) <= svd


def test_calibration_is_named_only_where_it_is_used() -> None:
    model, asked, data = _mlp()
    assert data.digest in _plan(model, "params=0.3", data=data, **asked).calibration
    assert _plan(model, "params=0.3", data=data, method="kron", **asked).calibration == ""
    assert _plan(model, "params=0.3", **asked).calibration == ""
    with pytest.raises(PlanError, match="no calibration data"):
        _plan(model, "params=0.3", method="kron-data", **asked)


# Determinism and the cache


def _bytes(plan: Plan) -> str:
    return plan.model_dump_json(by_alias=True)


@pytest.mark.slow
@EVERY
@BY_DATA
def test_plans_are_the_same_to_the_last_byte(
    name: str, by_data: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked, data = MODELS[name]()
    held = data if by_data else None

    def plan() -> str:
        return _bytes(_plan(model, "params=0.3", data=held, **asked))

    state = torch.get_rng_state()
    cold = plan()
    assert torch.equal(torch.get_rng_state(), state)
    folder = tmp_path / "other"
    monkeypatch.setenv("BP_CONVERT_CACHE", str(folder))
    assert plan() == cold  # cold again
    kept = sorted((folder / "curves").iterdir())
    assert len(kept) >= len(_plan(model, "params=0.3", **asked).layers) - 1
    torch.manual_seed(99)
    assert plan() == cold  # warm
    for number, path in enumerate(sorted((folder / "curves").iterdir())):
        whole = path.read_bytes()
        path.write_bytes([whole[: len(whole) // 2], b"", b"nonsense", whole[::-1]][number % 4])
    assert plan() == cold  # corrupt
    blocked = tmp_path / "a file"
    blocked.write_text("")
    monkeypatch.setenv("BP_CONVERT_CACHE", str(blocked))
    assert plan() == cold  # no folder to be had


def test_a_warm_cache_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from bp_convert.calibration import evidence
    from bp_convert.search import candidates

    model, asked, data = _mlp()
    first = _bytes(_plan(model, "params=0.3", data=data, **asked))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(candidates, "curves_of", refuse)
    monkeypatch.setattr(evidence, "gather", refuse)
    monkeypatch.setattr(evidence, "Trials", refuse)
    assert _bytes(_plan(model, "params=0.3", data=data, **asked)) == first
    _plan(model, "params=0.1", "macs=0.5", data=data, **asked)
    other = examples(vectors(200, 48))
    with pytest.raises(AssertionError, match="computed again"):  # other data
        _plan(model, "params=0.3", data=other, **asked)
    with torch.no_grad():
        model.get_parameter("0.weight")[0, 0] += 1
    with pytest.raises(AssertionError, match="computed again"):  # another weight
        _plan(model, "params=0.3", data=data, **asked)


def test_the_model_is_left_as_it_was() -> None:
    for make in MODELS.values():
        model, asked, data = make()
        model.train()
        flags = [m.training for m in model.modules()]
        before = {n: t.clone() for n, t in model.state_dict().items()}
        _plan(model, "params=0.3", data=data, **asked)
        assert [m.training for m in model.modules()] == flags
        assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# What a target leaves alone


def test_floors_hold() -> None:
    model, asked, _ = _mlp()
    free = _plan(model, "params=0.2", **asked)
    size = 72 * 40
    share = free.layers[2].factors["weight"].params / size
    assert share < 0.5
    rule = LayerRule(match="4", floor=0.5)
    plan = _plan(model, "params=0.2", layers=(rule,), **asked)
    assert plan.params.ratio <= 0.2
    kept = plan.layers[2]
    assert kept.action == "kept" or kept.factors["weight"].params >= 0.5 * size
    assert plan.error is not None
    assert plan.error >= (free.error or 0)
    with pytest.raises(PlanError, match="out of reach"):
        _plan(model, "params=0.2", layers=(LayerRule(match="*", floor=0.3),), **asked)
    whole = _plan(model, "params=0.5", layers=(LayerRule(match="4", floor=1.0),), **asked)
    assert whole.layers[2].action == "kept"


def test_rules_with_pairs_of_their_own_stand_beside_a_target() -> None:
    model, asked, data = _mlp()
    pairs = Pairs(out=(6, 10), inp=(6, 8))
    rule = LayerRule(match="0", pairs=pairs, rank=3)
    for held in (None, data):
        plan = _plan(model, "params=0.3", layers=(rule,), data=held, **asked)
        spec = FactorSpec(out=(6, 10), inp=(6, 8), rank=3)
        assert plan.layers[0].factors == {"weight": spec}
        assert plan.params.ratio <= 0.3
        assert plan.params.ratio >= 0.95 * 0.3
    kept = LayerRule(match="2", keep=True)
    plan = _plan(model, "params=0.75", layers=(rule, kept), exclude=("4",), **asked)
    assert [layer.action for layer in plan.layers[:3]] == ["replaced", "kept", "kept"]
    assert plan.params.ratio <= 0.75


def test_what_is_out_of_reach_is_said_with_the_range() -> None:
    model, asked, _ = _mlp()
    for text in ("params=0.001", "macs=0.001", "size=0.001"):
        with pytest.raises(PlanError, match="out of reach") as caught:
            _plan(model, text, **asked)
        quantity = text.partition("=")[0]
        found = re.search(r"from ([\d,]+) ", caught.value.allowed)
        assert found is not None
        least = int(found[1].replace(",", ""))
        plan = _plan(model, f"{quantity}={least + 1}", **asked)
        assert plan.converted
        with pytest.raises(PlanError, match="out of reach"):
            _plan(model, f"{quantity}={int(0.97 * least)}", **asked)


def test_all_may_stay_as_it_is() -> None:
    model, asked, _ = _mlp()
    plan = _plan(model, "params=1", **asked)
    assert plan.params.ratio <= 1
    assert (plan.error or 0) < 1e-3


def test_a_target_goes_with_no_widening() -> None:
    model, asked, _ = _mlp()
    with pytest.raises(PlanError, match="widening"):
        _plan(model, "params=0.5", alpha=2, **asked)


def test_multiply_adds_need_an_input() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.inner = nn.Bilinear(3, 4, 8)
            self.out = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.out(self.inner(x * self.weight, y))

    with pytest.raises(PlanError, match="multiply-adds cannot be counted"):
        _plan(Odd(), "macs=0.5")


def test_the_guard_keeps_the_speed_where_the_target_leaves_room() -> None:
    model, asked, _ = _mlp()
    guarded = _plan(model, "params=0.6", convert_anyway=False, **asked)
    assert guarded.params.ratio <= 0.6
    free = _plan(model, "params=0.6", **asked)
    assert (guarded.error or 0) >= (free.error or 0) * 0.999


def test_layers_that_data_never_reaches_go_by_their_weights() -> None:
    class Sided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.spare = nn.Linear(24, 36), nn.Linear(24, 36)
            self.head = nn.Linear(36, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.stem(x)
            return self.head(y + self.spare(x) if len(x) == 1 else y)

    plan = _plan(Sided(), "params=0.75", data=examples(vectors(60, 24)))
    assert plan.params.ratio <= 0.75
    spare = plan.layer("spare")
    assert spare is not None
    assert spare.sensitivity == 1


class _Sequence(nn.Module):
    """An LSTM over (N, 12, C) steps, and a Linear of each step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.lstm(x)[0])
        return found


def _macs(model: nn.Module, width: int) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.to("meta")(torch.zeros(1, 12, width, device="meta"))
    return int(counter.get_total_flops() // 2)


@pytest.mark.slow
def test_multiply_adds_count_the_way_that_an_lstm_runs() -> None:
    """A small one runs on built weights and saves none, whatever its factors are."""
    torch.manual_seed(0)
    small = _Sequence(32)
    with pytest.raises(PlanError, match="out of reach") as caught:
        _plan(small, "macs=0.4", inputs=(spec(12, 32),))
    found = re.search(r"from ([\d,]+)", str(caught.value))
    assert found
    assert int(found[1].replace(",", "")) > 12 * 32 * 32 * 8  # the LSTM whole
    large = _Sequence(320)
    plan = _plan(large, "macs=0.3", inputs=(spec(12, 320),))
    assert plan.macs
    before, after = plan.macs.before, plan.macs.after
    assert 0.29 * before <= after <= 0.3 * before
    assert _macs(apply_plan(large, plan).model, 320) == after
    assert before == _macs(large, 320)


@pytest.mark.slow
def test_single_terms_take_up_what_the_grid_of_terms_leaves() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(900, 700))
    plan = _plan(model, "params=0.5", inputs=(spec(900),))
    term = plan.layers[0].factors["weight"].model_copy(update={"rank": 1}).params
    assert 0 <= 0.5 * plan.params.before - plan.params.after < term


def test_nothing_to_choose_from_meets_an_error_but_no_share() -> None:
    model = nn.Sequential(nn.ReLU(), nn.BatchNorm1d(4))
    assert _plan(model, "error=0.1", inputs=(spec(4),)).converted == ()
    with pytest.raises(PlanError, match="out of reach"):
        _plan(model, "params=0.5", inputs=(spec(4),))


@pytest.mark.slow
def test_multiply_adds_that_come_out_higher_are_made_up_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each role's own count is an estimate; what is held to the limit is the whole layer's."""
    monkeypatch.setattr(units, "bilinear_macs", lambda spec: bilinear_macs(spec) * 8 // 10)
    torch.manual_seed(0)
    plan = _plan(_Sequence(320), "macs=0.3", inputs=(spec(12, 320),))
    assert plan.macs
    assert 0.28 * plan.macs.before <= plan.macs.after <= 0.3 * plan.macs.before


@pytest.mark.slow
def test_a_limit_that_only_whole_layers_keep_is_no_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where an LSTM's roles cost more together than each was counted for, it stays whole."""
    monkeypatch.setattr(units.FreeLayer, "builds", False)
    monkeypatch.setattr(LSTMKind, "macs", lambda *_: 10**9)
    torch.manual_seed(0)
    plan = _plan(_Sequence(320), "macs=0.95", inputs=(spec(12, 320),))
    assert plan.macs
    assert 0.9 * plan.macs.before <= plan.macs.after <= 0.95 * plan.macs.before
    assert [layer.action for layer in plan.layers] == ["kept", "replaced"]
    with pytest.raises(PlanError, match="out of reach"):
        _plan(_Sequence(320), "macs=0.7", inputs=(spec(12, 320),))


class _Deep(nn.Module):
    """An LSTM of many matrices, whose file has a long head for its size."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(48, 64, num_layers=3, bidirectional=True, batch_first=True)
        self.head = nn.Linear(128, 24)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.rnn(x)[0][:, -1])
        return out


def _normed(norms: int) -> nn.Module:
    layers = [nn.Linear(160, 160) for _ in range(10)]
    return nn.Sequential(*(one for layer in layers for one in (layer, *_norms(norms // 10)))).eval()


def _norms(many: int) -> list[nn.Module]:
    return [nn.BatchNorm1d(160) for _ in range(many)]


SAVED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "mlp": (lambda: mlp(256, 320, 256, 10), "256"),
    "cnn": (lambda: cnn(48), "3x12x12"),
    "deep": (_Deep, "8x48"),
    "resnet": (lambda: build("resnet", depth=11, width=8), "3x32x32"),
    "norms": (lambda: _normed(40), "160"),  # more bytes for places than for many a number
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
def test_a_pt_file_keeps_its_limit_to_the_byte(name: str, share: float, tmp_path: Path) -> None:
    make, shape = SAVED[name]
    torch.manual_seed(0)
    model = make()
    limit = int(share * 4 * sum(p.numel() for p in model.parameters()))
    # None: in whatever bits lose least, which spends less exactly, as int8 does.
    for store in ("fp32", "int8", None):
        asked: dict[str, Any] = {"target": f"size={limit}b", "store": store}
        plan = bp_convert.plan(model, inputs=[shape], convert_anyway=True, **asked)
        bp_convert.save(bp_convert.apply(model, plan), tmp_path / f"{store}.pt")
        taken = (tmp_path / f"{store}.pt").stat().st_size
        assert (0.95 if store == "fp32" else 0.2) * limit <= taken <= limit
        assert store or taken >= 0.6 * limit


def test_what_cannot_be_pickled_is_counted_as_well() -> None:
    model = mlp(256, 320, 256, 10)
    asked: dict[str, Any] = {"inputs": (spec(256),), "store": "fp32"}
    before = _plan(model, "size=0.3", **asked).params.after
    model.note = lambda: None
    after = _plan(model, "size=0.3", **asked).params.after
    assert 0.98 * before <= after <= 1.02 * before
