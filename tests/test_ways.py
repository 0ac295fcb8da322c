"""The planner names each layer's way; it lives in plans and files; one call changes all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bp_convert
from bp_convert.costs import measure
from bp_convert.errors import PlanError
from bp_convert.kinds import KINDS
from bp_convert.kinds.speed import Speed
from bp_convert.ways.expanding import kept_bytes
from tests.tolerances import assert_near

INPUTS = ["256"]


def _model() -> nn.Sequential:
    """Return a model whose layers are slower on factors for one example, but for the third."""
    torch.manual_seed(0)
    layers = (nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 6144), nn.ReLU(), nn.Linear(6144, 8))
    return nn.Sequential(*layers).eval()


def _ways(plan: bp_convert.Plan) -> list[str]:
    return [f"{layer.action} {layer.way}" for layer in plan.layers]


def _now(model: nn.Module) -> list[str]:
    return [one.way for one in model.modules() if hasattr(one, "way")]


def test_layers_that_would_be_slower_are_expanded() -> None:
    plan = bp_convert.plan(_model(), inputs=INPUTS)
    first, large = plan.layers[:2]
    assert (first.action, first.way) == ("replaced", "expanded")
    assert first.macs == (256 * 256, 256 * 256)  # as it runs
    assert first.notes[0].startswith("runs expanded")
    assert (large.action, large.way) == ("replaced", "factored")
    assert large.macs[1] < large.macs[0]
    assert plan.macs is not None
    assert plan.macs.after == sum(one.macs[1] for one in plan.layers)
    bytes_of_it = 4 * (256 * 256 + 256)
    assert any(f"{bytes_of_it / 1e6:.3g} MB of dense weights" in note for note in plan.notes)


def test_factored_asks_for_what_expands_nothing() -> None:
    plan = bp_convert.plan(_model(), inputs=INPUTS, ways="factored")
    assert _ways(plan)[:2] == ["kept factored", "replaced factored"]
    assert "slower than the dense layer" in plan.layers[0].reason
    assert not any("expanded" in note for note in plan.notes)
    asked = bp_convert.plan(_model(), inputs=INPUTS, ways="factored", convert_anyway=True)
    assert _ways(asked)[0] == "replaced factored"


def test_expanded_asks_for_all() -> None:
    plan = bp_convert.plan(_model(), inputs=INPUTS, ways="expanded")
    assert _ways(plan)[:2] == ["replaced expanded", "replaced expanded"]


def test_a_rule_names_the_way_of_its_layers() -> None:
    free = {"inputs": INPUTS, "include": ["0", "2"]}
    for rules, ways, expected in (
        ([("0", "factored")], "auto", ["kept factored", "replaced factored"]),
        ([("2", "expanded")], "factored", ["kept factored", "replaced expanded"]),
        ([("2", "auto"), ("*", "factored")], "expanded", ["kept factored", "replaced factored"]),
    ):
        layers = [{"match": match, "way": way} for match, way in rules]
        plan = bp_convert.plan(_model(), layers=layers, ways=ways, **free)  # type: ignore[arg-type]
        assert _ways(plan)[:2] == expected
        again = bp_convert.Plan.model_validate_json(plan.model_dump_json(by_alias=True))
        assert again == plan


def test_a_rule_s_way_holds_at_a_target_too() -> None:
    for way in ("factored", "expanded"):
        layers = [{"match": "2", "way": way}]
        plan = bp_convert.plan(_model(), inputs=INPUTS, target="params=0.2", layers=layers)
        large = plan.layer("2")
        assert large is not None
        assert (large.action, large.way) == ("replaced", way)
    with pytest.raises(PlanError, match="multiply-adds"):
        bp_convert.plan(_model(), inputs=INPUTS, target="macs=0.3", layers=layers)


def test_limits_of_operations_and_alpha_leave_factors_alone() -> None:
    for more in ({"target": "macs=0.3"}, {"alpha": 2.0}, {"pairs": "paper"}):
        plan = bp_convert.plan(_model(), inputs=INPUTS, **more)  # type: ignore[arg-type]
        assert {one.way for one in plan.layers} == {"factored"}
    with pytest.raises(PlanError, match="multiply-adds"):
        bp_convert.plan(_model(), inputs=INPUTS, target="macs=0.3", ways="expanded")


def test_a_target_chooses_the_way_too() -> None:
    plan = bp_convert.plan(_model(), inputs=INPUTS, target="params=0.5")
    for one in plan.converted:
        assert one.way == "expanded" or not any("slower" in note for note in one.notes)


def test_plans_without_the_field_are_factored() -> None:
    plan = bp_convert.plan(_model(), inputs=INPUTS, ways="factored")
    text = plan.model_dump_json(by_alias=True).replace('"way":"factored",', "")
    assert '"way"' not in text
    assert bp_convert.Plan.model_validate_json(text) == plan


def test_only_kinds_that_have_the_way_may_be_given_it(tmp_path: Path) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.Parameter(torch.randn(4, 24, 36))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.stack[0])

    model = Experts().eval()
    plan = bp_convert.plan(model, inputs=["36"], convert_anyway=True, convert_head=True)
    assert plan.converted
    assert plan.converted[0].way == "factored"
    with pytest.raises(PlanError, match="runs on factors alone"):
        bp_convert.plan(model, inputs=["36"], layers=[{"match": "*", "way": "expanded"}])
    layer = plan.converted[0].model_copy(update={"way": "expanded"})
    with pytest.raises(PlanError, match="expanded"):
        bp_convert.apply(model, plan.model_copy(update={"layers": (layer,)}))


def test_every_kind_but_stacks_expands() -> None:
    assert {one.name for one in KINDS if not one.twin.EXPANDS} == {
        one.name for one in KINDS if one.bare
    }


def test_the_faster_way_is_taken() -> None:
    assert Speed(10, 20, 11).way() == "expanded"
    assert Speed(10, 9, 11).way() == "factored"
    assert Speed(10, 20, 11).way("factored") == "factored"
    assert Speed(10, 9, 11).way("expanded") == "expanded"
    assert Speed(10, 20).way("expanded") == "factored"  # which it does not have
    assert Speed(10, 20, 11, 9).way() == "fused"
    assert Speed(10, 20, 11, 9).way("factored") == "factored"


@pytest.mark.parametrize("file", ["small.pt", "small.safetensors"])
def test_files_keep_the_ways(tmp_path: Path, file: str) -> None:
    model = _model()
    small, _ = bp_convert.convert(model, inputs=INPUTS)
    x = torch.randn(2, 256)
    with torch.no_grad():
        expected = small(x)
        assert kept_bytes(small) == 4 * 256 * 256
    bp_convert.save(small, tmp_path / file)
    again: Any = bp_convert.load(tmp_path / file, model=None if file.endswith("pt") else model)
    assert _now(again) == _now(small) == ["expanded", "factored"]
    assert kept_bytes(again) == 0
    with torch.no_grad():
        assert_near(again(x), expected)
    bp_convert.save(again, tmp_path / f"again-{file}")  # no larger for what is kept
    sizes = [(tmp_path / name).stat().st_size for name in (file, f"again-{file}")]
    assert sizes[1] == pytest.approx(sizes[0], abs=2000)


def test_one_call_changes_all() -> None:
    small, _ = bp_convert.convert(_model(), inputs=INPUTS)
    x = torch.randn(2, 256)
    with torch.no_grad():
        expected = small(x)
        assert bp_convert.run_as(small, "small") is small
        assert _now(small) == ["factored", "factored"]
        assert_near(small(x), expected)
        assert kept_bytes(small) == 0
        assert _now(bp_convert.run_as(small, "planned")) == ["expanded", "factored"]
        bp_convert.run_as(small, "small")
        assert _now(bp_convert.run_as(small, "fast")) == ["expanded", "factored"]
        assert_near(small(x), expected)
    with pytest.raises(PlanError, match="fast, small or planned"):
        bp_convert.run_as(small, "quick")  # type: ignore[arg-type]


def test_what_is_measured_counts_the_kept_weight() -> None:
    model = _model()
    plan = bp_convert.plan(model, inputs=INPUTS)
    small = bp_convert.apply(model, plan)
    wide = measure(model, small, plan.inputs, batch=1).converted_peak_bytes
    lean = measure(model, bp_convert.run_as(small, "small"), plan.inputs, batch=1)
    assert wide is not None
    assert lean.converted_peak_bytes is not None
    assert wide - lean.converted_peak_bytes == pytest.approx(4 * 256 * 256, rel=0.05)


def test_the_table_says_which_layers_are_expanded() -> None:
    _, report = bp_convert.convert(_model(), inputs=INPUTS)
    text = str(report)
    rows = [line for line in text.splitlines() if line.startswith(("0 ", "2 "))]
    assert ["expanded" in row for row in rows] == [True, False]
    assert ["factored" in row for row in rows] == [False, True]
    assert "1 layer runs expanded" in text
    assert "slower" not in report.verdict
