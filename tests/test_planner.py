"""What a plan says: every layer, what becomes of it, and why."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from bp_convert.errors import PlanError, TraceError
from bp_convert.planner import prepare
from bp_convert.values.plan import Plan
from bp_convert.values.settings import LayerRule, Pairs, Settings
from bp_convert.values.tensors import TensorSpec


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _plan(model: nn.Module, **asked: Any) -> Plan:
    if "inputs" not in asked:
        asked["inputs"] = (TensorSpec(shape=(next(model.parameters()).shape[1],)),)
    return prepare(model, Settings(**asked)).plan


def _actions(plan: Plan) -> dict[str, str]:
    return {layer.name: layer.action for layer in plan.layers}


def test_the_layer_that_makes_the_output_stays_full_by_default() -> None:
    model = _mlp(512, 512, 512, 64)
    plan = _plan(model, convert_anyway=True)
    assert _actions(plan) == {"0": "replaced", "2": "replaced", "4": "kept"}
    last = plan.layer("4")
    assert last is not None
    assert "output" in last.reason
    assert "--convert-head" in last.reason
    assert _actions(_plan(model, convert_head=True, convert_anyway=True))["4"] == "replaced"
    rule = LayerRule(match="4", rank=1)
    assert _actions(_plan(model, layers=(rule,), convert_anyway=True))["4"] == "replaced"


def test_alpha_widens_all_but_the_output() -> None:
    plan = _plan(_mlp(512, 512, 512, 10), alpha=2, pairs="paper")
    widths = [(layer.inputs[1], layer.outputs[1]) for layer in plan.layers]
    assert widths == [(512, 1024), (1024, 1024), (1024, 10)]
    assert [layer.action for layer in plan.layers] == ["replaced", "replaced", "widened"]


def test_a_fractional_alpha_gives_whole_widths() -> None:
    plan = _plan(_mlp(512, 512, 10), alpha=1.5)
    assert plan.layers[0].outputs == (512, 768)


def test_a_tiny_layer_would_be_slower_and_is_kept_until_asked() -> None:
    model = _mlp(16, 16, 10)
    kept = _plan(model).layers[0]
    assert kept.action == "kept"
    assert "dense layer" in kept.reason
    for asked in (
        {"convert_anyway": True},
        {"pairs": "paper"},
        {"alpha": 2},
        {"layers": (LayerRule(match="0", rank=1),)},
    ):
        layer = _plan(model, **asked).layers[0]
        assert layer.action == "replaced", asked
        assert any("slower" in note for note in layer.notes), asked


def test_a_layer_that_would_grow_is_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2))
    layer = _plan(model, pairs="paper", rank=2).layers[0]
    assert layer.action == "kept"
    assert "would grow by 50 %" in layer.reason or "would grow" in layer.reason


def test_prime_widths_are_kept_with_the_number_unless_low_rank() -> None:
    model = _mlp(64, 509, 64, 10)
    layer = _plan(model, pairs="paper").layers[0]
    assert (layer.action, layer.reason) == ("kept", "prime width 509 has no factor pair")
    assert _plan(model, rank=0.25, convert_anyway=True).layers[0].action == "replaced"


def test_a_share_of_the_parameters_is_met_from_below() -> None:
    plan = _plan(_mlp(768, 3072, 768, 10), rank=0.25)
    for layer in plan.converted:
        bias = layer.outputs[1]
        share = (layer.params[1] - bias) / (layer.params[0] - bias)
        assert 0.24 < share <= 0.25


def test_include_exclude_and_rules() -> None:
    model = _mlp(512, 512, 512, 512, 10)
    plan = _plan(model, include=("0", "re:[24]"), exclude=("2",), convert_anyway=True)
    reasons = {layer.name: layer.reason for layer in plan.layers}
    assert _actions(plan)["0"] == _actions(plan)["4"] == "replaced"
    assert reasons["2"] == "excluded"
    assert reasons["6"] == "not included"
    rules = (LayerRule(match="2", keep=True), LayerRule(match="*", rank=3))
    plan = _plan(model, layers=rules)
    assert "kept by the rule" in (plan.layer("2") or plan.layers[0]).reason
    assert plan.layers[0].factors["weight"].rank == 3


def test_a_type_name_selects() -> None:
    model = nn.Sequential(nn.Conv1d(8, 32, 3), nn.Flatten(), nn.Linear(448, 64), nn.Linear(64, 10))
    inputs = (TensorSpec(shape=(8, 16)),)
    plan = _plan(model, include=("Linear",), convert_anyway=True, inputs=inputs)
    assert _actions(plan) == {"0": "kept", "2": "replaced", "3": "kept"}


class _Odd(nn.Module):
    """Names that are globs as well."""

    def __init__(self) -> None:
        super().__init__()
        self.names = ("scale[0]", "scale0", "a*", "ab", "[ab]")
        for name in self.names:
            self.add_module(name, nn.Linear(64, 64))
        self.add_module("block[1]", nn.ModuleDict({"fc": nn.Linear(64, 64)}))
        self.block1 = nn.ModuleDict({"fc": nn.Linear(64, 64)})
        self.last = nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in (*self.names, "block[1].fc", "block1.fc", "last"):
            x = self.get_submodule(name)(x)
        return x


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("scale[0]", {"scale[0]"}),
        ("scale[[]0]", {"scale[0]"}),
        ("scale[0-9]", {"scale0"}),
        ("a*", {"a*"}),
        ("a?", {"a*", "ab"}),
        ("[ab]", {"[ab]"}),
        ("block[1].*", {"block[1].fc"}),
        ("block[12].*", {"block1.fc"}),
        ("block*.fc", {"block[1].fc", "block1.fc"}),
        ("re:scale.0.", {"scale[0]"}),
    ],
)
def test_a_name_that_looks_like_a_glob_is_that_name(pattern: str, names: set[str]) -> None:
    model = _Odd()
    asked = {"inputs": (TensorSpec(shape=(64,)),), "convert_anyway": True}
    every = {one.name for one in _plan(model, **asked).converted}
    assert "last" not in every
    assert {one.name for one in _plan(model, include=(pattern,), **asked).converted} == names
    assert {
        one.name for one in _plan(model, exclude=(pattern,), **asked).converted
    } == every - names
    rules = (LayerRule(match=pattern, keep=True),)
    assert {one.name for one in _plan(model, layers=rules, **asked).converted} == every - names


@pytest.mark.parametrize("field", ["include", "exclude", "layers"])
def test_a_pattern_that_matches_nothing_lists_near_names(field: str) -> None:
    pattern: Any = (LayerRule(match="encodr"),) if field == "layers" else ("encodr",)
    model = nn.ModuleDict({"encoder": nn.Linear(4, 4), "decoder": nn.Linear(4, 4)})
    with pytest.raises(PlanError, match=r"'encodr'(.|\n)*none of the 2(.|\n)*encoder"):
        prepare(model, Settings(**{field: pattern}))


def test_a_broken_regular_expression_is_an_error() -> None:
    with pytest.raises(PlanError, match="regular expression"):
        _plan(_mlp(4, 4), include=("re:(",))


def test_explicit_pairs_are_taken_or_refused_with_the_numbers() -> None:
    model = _mlp(512, 512, 10)
    rule = LayerRule(match="0", pairs=Pairs(out=(8, 64), inp=(32, 16)), rank=2)
    spec = _plan(model, layers=(rule,)).layers[0].factors["weight"]
    assert (spec.out, spec.inp, spec.rank) == ((8, 64), (32, 16), 2)
    wrong = LayerRule(match="0", pairs=Pairs(out=(8, 63), inp=(32, 16)))
    with pytest.raises(PlanError, match=r"8 x 63 = 504(.|\n)*two factors of 512"):
        _plan(model, layers=(wrong,))


class _Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(512, 512)
        self.again = self.one
        self.table = nn.Embedding(64, 512)
        self.tied = nn.Linear(512, 64, bias=False)
        self.tied.weight = self.table.weight
        self.normed = weight_norm(nn.Linear(512, 512))
        self.unused = nn.Linear(512, 512)
        self.last = nn.Linear(64, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.again(self.one(self.table(tokens)))
        return self.last(self.tied(self.normed(x)))


def test_shared_tied_parametrised_and_unused_layers() -> None:
    inputs = (TensorSpec(dtype="int64", shape=(5,)),)
    plan = _plan(_Shared(), inputs=inputs, convert_anyway=True)
    one = plan.layer("again")
    assert one is not None
    assert (one.name, one.aliases, one.action) == ("one", ("again",), "replaced")
    reasons = {layer.name: layer.reason for layer in plan.layers}
    assert reasons["table"] == "its weight is tied to tied.weight"
    assert reasons["tied"] == "its weight is tied to table.weight"
    assert reasons["normed"] == ""
    kept = _plan(_Shared(), inputs=inputs, convert_anyway=True, keep_parametrized=True)
    normed = kept.layer("normed")
    assert normed is not None
    assert normed.reason == "its weight is computed (weight norm), and that is to be kept"
    assert "never called" in reasons["unused"]


def test_attention_is_one_layer_with_its_projection() -> None:
    model = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    settings = Settings(inputs=(TensorSpec(shape=(5, 64)),), pairs="paper", exclude=("linear*",))
    plan = prepare(model, settings).plan
    assert [one.name for one in plan.layers] == ["self_attn", "linear1", "linear2"]
    assert [one.name for one in plan.converted] == ["self_attn"]
    assert any(change.attr == "activation_relu_or_gelu" for change in plan.attrs)


def test_widening_without_an_input_says_what_to_give() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.a(x) + y

    with pytest.raises(PlanError, match="--input"):
        prepare(Odd(), Settings(alpha=2))
    plan = prepare(Odd(), Settings(pairs="paper")).plan
    assert any("--input" in note for note in plan.notes)


def test_an_input_that_the_model_refuses_is_quoted() -> None:
    with pytest.raises(TraceError, match=r"float32:1x9(.|\n)*--input"):
        _plan(_mlp(8, 8, 2), inputs=(TensorSpec(shape=(9,)),))


def test_same_model_same_settings_same_bytes() -> None:
    model = _mlp(512, 512, 64)
    one, two = (_plan(model, alpha=2).model_dump_json() for _ in range(2))
    assert one == two


def test_plans_survive_json() -> None:
    plan = _plan(_mlp(512, 512, 64), alpha=2)
    text = plan.model_dump_json(by_alias=True)
    assert Plan.model_validate_json(text) == plan
    assert '"in":' in text


def test_predicted_counts_are_those_of_the_whole_model() -> None:
    plan = _plan(_mlp(512, 512, 64), alpha=2)
    assert plan.params.after == sum(layer.params[1] for layer in plan.layers)
    assert plan.macs is not None
    assert plan.macs.after == sum(layer.macs[1] for layer in plan.layers)
    assert plan.macs.before == 512 * 512 + 512 * 64
    assert plan.bytes.after == 4 * plan.params.after


def test_a_converted_model_is_left_alone() -> None:
    from bp_convert.surgery import apply_plan

    model = _mlp(512, 512, 512, 64)
    done = apply_plan(model, _plan(model, convert_anyway=True)).model
    assert [layer.kind for layer in prepare(done, Settings()).plan.layers] == ["Linear"]


def test_a_plan_says_whether_widening_keeps_the_function_and_where_not() -> None:
    plan = _plan(_mlp(512, 512, 512, 10), alpha=2, init="warm")
    assert any("keeps the function" in note for note in plan.notes)

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(torch.relu(self.b(torch.cumsum(self.a(x), 1))))

    plan = _plan(Sums(), alpha=2, init="warm")
    layer = plan.layer("b")
    assert layer is not None
    assert any(note.startswith("starts from noise: its new input") for note in layer.notes)
    assert any("does not keep the function" in note for note in plan.notes)
    drawn = _plan(_mlp(512, 512, 512, 10), alpha=2)
    assert any("does not keep the function" in note for note in drawn.notes)
    random = _plan(Sums(), alpha=2, init="random")
    assert not any("the function" in note for note in random.notes)
