"""Probe and sweep as functions: what they say of layers and of points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert import pipeline
from bp_convert.errors import DataError, PlanError
from bp_convert.studies import probe, recommended, sweep
from bp_convert.values.report import Score
from bp_convert.values.settings import Settings
from bp_convert.values.study import Point, Probe
from bp_convert.values.target import Target
from bp_convert.verify import fingerprint_of_data


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(48, 72), nn.ReLU(), nn.Linear(72, 60), nn.ReLU(), nn.Linear(60, 10)
    )


def data(count: int = 80) -> Tensor:
    return torch.randn(count, 10) @ torch.randn(10, 48)


# probe


@pytest.mark.parametrize("by_data", [False, True], ids=["weights", "data"])
def test_every_layer_is_probed_and_low_rank_is_never_better(by_data: bool) -> None:
    net, x = model(), data()
    before = fingerprint_of_data(net)
    found = probe(net, calibrate=x if by_data else None, error=0.4)
    assert fingerprint_of_data(net) == before
    assert {row.layer for row in found.rows} == {"0", "2", "4"}
    assert bool(found.calibration) == by_data
    assert list(found.rows) == sorted(found.rows, key=lambda row: (-row.saves, -row.params))
    for row in found.rows:
        layer = net.get_submodule(row.layer)
        assert isinstance(layer, nn.Linear)
        assert row.shape == (layer.out_features, layer.in_features)
        assert row.params == layer.weight.numel()
        assert 0 <= row.saves < row.params
        known = [one for one in row.errors if one is not None]
        assert known == sorted(known)  # smaller shares err more
        assert all(0 <= one <= 1 for one in known)
        for ours, svd in zip(row.errors, row.svd, strict=True):
            assert svd is None or (ours is not None and ours <= svd)
        assert row.best is not None
        assert row.best.params <= 0.25 * row.params
        assert row.best.out[0] * row.best.out[1] == layer.out_features
        assert row.best.inp[0] * row.best.inp[1] == layer.in_features


def test_the_svd_column_is_torch_s_truncated_svd() -> None:
    layer = nn.Linear(40, 40, bias=False)
    net = nn.Sequential(layer)
    row = probe(net, shares=(0.5, 0.25)).rows[0]
    values = torch.linalg.svdvals(layer.weight.detach().double())
    for share, error in zip((0.5, 0.25), row.svd, strict=True):
        rank = int(share * 1600) // 80
        wanted = float((values[rank:].square().sum() / values.square().sum()).sqrt())
        assert error == pytest.approx(wanted, abs=1e-3)


def test_a_layer_of_low_rank_saves_most() -> None:
    net = model()
    with torch.no_grad():
        net.get_parameter("2.weight").copy_(torch.randn(60, 3) @ torch.randn(3, 72))
    row = probe(net, error=0.1).rows[0]
    assert row.layer == "2"
    assert row.saves >= 60 * 72 - 3 * (60 + 72)
    assert row.errors[1] == pytest.approx(0, abs=1e-2)


def test_a_larger_error_saves_more() -> None:
    net = model()
    saved = [sum(row.saves for row in probe(net, error=e).rows) for e in (0.1, 0.3, 0.6)]
    assert saved == sorted(set(saved))


def test_layers_that_cannot_be_converted_stand_last_with_why() -> None:
    net = nn.Sequential(nn.Conv2d(12, 12, 3, groups=12), nn.Flatten(), nn.Linear(12, 30))
    settings = Settings(inputs=pipeline.plan(net, inputs=["12x3x3"]).inputs, exclude=("2",))
    found = probe(net, settings)
    assert [(row.layer, row.reason) for row in found.rows if row.layer == "2"] == [
        ("2", "excluded")
    ]
    reasons = [bool(row.reason) for row in found.rows]
    assert reasons == sorted(reasons)
    kept = next(row for row in found.rows if row.reason)
    assert kept.errors == ()
    assert kept.params > 0


def test_a_probe_survives_json() -> None:
    found = probe(model())
    assert Probe.model_validate_json(found.model_dump_json(by_alias=True)) == found


# sweep


def test_a_sweep_does_not_score_on_what_it_was_fitted_to() -> None:
    x = data()
    with pytest.raises(DataError, match="calibration has used the first 80"):
        sweep(model(), ["params=0.6"], calibrate=x, evaluate=x)


@pytest.mark.slow
def test_a_sweep_scores_what_it_keeps(tmp_path: Path) -> None:
    net, both = model(), data(160)
    x, other = both[:120], both[120:]
    before = fingerprint_of_data(net)
    targets = [Target.parse("params=0.6"), Target.parse("params=0.3")]
    files = {one: tmp_path / f"{one}.pt" for one in targets}
    found = sweep(net, ["params=0.6", targets[1]], calibrate=x, evaluate=other, metric="error",
                  files=files)  # fmt: skip
    assert fingerprint_of_data(net) == before
    total = sum(p.numel() for p in net.parameters())
    assert found.params == total
    with torch.no_grad():
        wanted = net(other)
        for point in found.points[::2]:
            small = bp_convert.load(point.file)
            assert not small.training
            assert point.params == sum(p.numel() for p in small.parameters())
            assert point.share == pytest.approx(point.params / total)
            assert point.score is not None
            error = (small(other) - wanted).norm() / wanted.norm()
            assert point.score.after == pytest.approx(float(error), rel=1e-4)
            assert Path(point.file) == files[Target.parse(point.target)]
            assert point.notes == ()
    ours, svd = found.points[::2], found.points[1::2]
    assert [point.method for point in svd] == ["svd", "svd"]
    for one, two in zip(ours, svd, strict=True):
        assert one.score is not None
        assert two.score is not None
        assert one.score.after <= two.score.after
        assert two.file == ""


def test_a_sweep_of_svd_has_nothing_beside_it() -> None:
    found = sweep(model(), ["params=0.5"], Settings(method="svd"))
    assert [point.method for point in found.points] == ["svd"]


def test_a_sweep_keeps_the_settings_own_targets() -> None:
    settings = Settings(target=(Target.parse("macs=0.4"),))
    found = sweep(model(), ["params=0.8", "params=0.2"], settings, beside=False)
    for point, share in zip(found.points, (0.8, 0.2), strict=True):
        assert point.share <= share
        assert point.macs_share is not None
        assert point.macs_share <= 0.4


def test_a_sweep_out_of_reach_is_refused_with_the_range() -> None:
    with pytest.raises(PlanError, match="a share of"):
        sweep(model(), ["params=0.0001"])
    found = sweep(model(), ["params=0.0001", "params=0.5"], beside=False)
    assert [bool(point.out_of_reach) for point in found.points] == [True, False]
    assert "a share of" in found.points[0].out_of_reach
    assert found.recommended == 1


def test_no_target_at_all_is_refused() -> None:
    with pytest.raises(PlanError, match="at least one target"):
        sweep(model(), [])


# The recommendation


def point(params: int, method: str = "kron", **given: Any) -> Point:
    return Point(
        target=f"params={params}", method=method, params=params, share=params / 1000, **given
    )


def scored(params: int, after: float, method: str = "kron", **given: Any) -> Point:
    fields = {"metric": "accuracy", "before": 0.8, "higher_is_better": True, "examples": 50}
    return point(params, method, score=Score(after=after, **{**fields, **given}))


def test_the_smallest_point_that_loses_little_is_recommended() -> None:
    points = [scored(700, 0.81), scored(500, 0.7925), scored(300, 0.79), scored(200, 0.791)]
    assert recommended(points, "kron")[0] == 1  # 0.792 is one in a hundred less
    assert recommended(points[::-1], "kron")[0] == 2
    place, words = recommended([*points, scored(250, 0.8)], "kron")
    assert place == 4
    assert "params=250" in words
    assert "1 % of the source's accuracy" in words


def test_truncated_svd_and_points_out_of_reach_are_never_recommended() -> None:
    points = [
        scored(700, 0.8),
        scored(100, 0.8, "svd"),
        point(0, out_of_reach="too small"),
    ]
    assert recommended(points, "kron")[0] == 0
    assert recommended(points[1:], "kron") == (None, "No target is within reach.")


def test_where_none_is_good_the_largest_stands_and_the_words_say_so() -> None:
    place, words = recommended([scored(300, 0.5), scored(700, 0.7)], "kron")
    assert place == 1
    assert words.startswith("None of these keeps 99 % of the source's accuracy")
    assert "params=700" in words


@pytest.mark.parametrize(
    ("after", "good"), [(20.1, True), (20.3, False), (18.0, True), (float("inf"), False)]
)
def test_a_metric_of_which_less_is_better(after: float, good: bool) -> None:
    fields: dict[str, Any] = {"metric": "perplexity", "before": 20.0, "higher_is_better": False}
    place, words = recommended([scored(500, after, **fields)], "kron")
    assert place == 0
    assert words.startswith("Take" if good else "None of these")


@pytest.mark.parametrize(("error", "good"), [(0.05, True), (0.1, True), (0.11, False)])
def test_without_scores_the_estimated_error_decides(error: float, good: bool) -> None:
    place, words = recommended([point(500, error=error), point(600, error=0.01)], "kron")
    assert place == (0 if good else 1)
    assert words.startswith("Take")
    assert "10 %" in words
    assert recommended([point(500, error=None)], "kron")[1].startswith("None of these")
