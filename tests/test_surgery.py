from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bp_convert.counting import recount
from bp_convert.errors import PlanError
from bp_convert.layers import BPLinear
from bp_convert.planner import prepare
from bp_convert.surgery import apply_plan, fingerprint
from bp_convert.values.factors import FactorSpec
from bp_convert.values.plan import Plan
from bp_convert.values.settings import Settings
from bp_convert.values.tensors import TensorSpec
from tests.tolerances import assert_near


class Net(nn.Module):
    """A shared layer, a reference in a plain list, a tied pair, a buffer, an extra attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 36)
        self.again = nn.Linear(36, 36)
        self.same = self.again
        self.steps = [self.again]
        self.one, self.two = nn.Linear(36, 36, bias=False), nn.Linear(36, 36, bias=False)
        self.two.weight = self.one.weight
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
        self.last = nn.Linear(36, 5)
        self.note = {"owner": "user"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.same(torch.relu(self.a(x)))
        for step in self.steps:
            x = step(torch.relu(x))
        return self.last(self.two(self.one(x)) * self.scale)


def _plan(model: nn.Module, **asked: object) -> Plan:
    inputs = (TensorSpec(shape=(16,)),)
    return prepare(model, Settings(inputs=inputs, convert_anyway=True, **asked)).plan  # type: ignore[arg-type]


def test_the_user_s_class_references_ties_and_buffers_survive() -> None:
    model = Net().eval()
    before = copy.deepcopy(model.state_dict())
    done = apply_plan(model, _plan(model, rank=10**6))
    new = done.model
    assert type(new) is Net
    assert isinstance(new.again, BPLinear)
    assert new.again is new.same
    assert new.again is new.steps[0]
    assert new.one.weight is new.two.weight
    assert new.note == model.note
    assert new.note is not model.note
    assert not new.training
    x = torch.randn(3, 16)
    assert_near(new(x), model(x))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    shared = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert not shared & {p.untyped_storage().data_ptr() for p in new.parameters()}


def test_keys_of_untouched_layers_stay() -> None:
    model = Net()
    new = apply_plan(model, _plan(model)).model
    assert {"last.weight", "last.bias", "one.weight", "two.weight"} <= set(new.state_dict())
    assert {"a.w1", "a.w2", "a.bias"} <= set(new.state_dict())


def test_a_frozen_layer_stays_frozen_and_dtypes_stay() -> None:
    model = Net().to(torch.bfloat16)
    model.a.requires_grad_(False)
    new = apply_plan(model, _plan(model)).model
    assert not any(p.requires_grad for p in new.a.parameters())
    assert all(p.requires_grad for p in new.again.parameters())
    assert all(p.dtype == torch.bfloat16 for p in new.parameters())


def test_a_seed_decides_a_random_start_and_the_global_state_is_left() -> None:
    model = Net()
    state = torch.get_rng_state()
    one, two, other = (
        apply_plan(model, _plan(model, init="random", seed=seed)).model for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.a.w1, two.a.w1)
    assert not torch.equal(one.a.w1, other.a.w1)


def _edited(plan: Plan, **change: object) -> Plan:
    layers = (plan.layers[0].model_copy(update=change), *plan.layers[1:])
    return plan.model_copy(update={"layers": layers})


def test_an_edited_rank_is_applied_as_edited() -> None:
    model = Net()
    plan = _plan(model, ways="factored")
    spec = plan.layers[0].factors["weight"].model_copy(update={"rank": 2})
    edited = recount(model, _edited(plan, factors={"weight": spec}))
    assert apply_plan(model, edited).model.a.factors.rank == 2
    more = plan.layers[0].factors["weight"].params
    assert edited.layers[0].params[1] == plan.layers[0].params[1] + more
    assert edited.params.after == plan.params.after + more
    assert edited.macs.after > plan.macs.after


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "zz"}, r"zz \(Linear\)(.|\n)*no such layer"),
        ({"kind": "Conv2d"}, r"a \(Conv2d\)(.|\n)*a Linear"),
        ({"inputs": (17, 17)}, r"16 -> 36(.|\n)*17 -> 36"),
        ({"factors": {}}, r"no factors for 'weight'"),
        ({"factors": {"weight": FactorSpec(out=(5, 7), inp=(4, 4))}}, r"5 x 7 = 35"),
    ],
)
def test_an_impossible_plan_is_refused_with_the_layer_and_the_numbers(
    change: dict[str, object], words: str
) -> None:
    from bp_convert.errors import BpConvertError

    model = Net()
    with pytest.raises(BpConvertError, match=words):
        apply_plan(model, _edited(_plan(model), **change))


def test_a_refused_kind_cannot_be_forced_by_editing() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(8 * 36, 4))
    plan = prepare(model, Settings(inputs=(TensorSpec(shape=(8, 8, 8)),))).plan
    spec = FactorSpec(out=(2, 4), inp=(8, 9), axes=(2, 2))
    with pytest.raises(PlanError, match="depth-wise"):
        apply_plan(model, _edited(plan, action="replaced", factors={"weight": spec}))


def test_a_weight_that_is_not_finite_names_its_layer() -> None:
    from bp_convert.errors import FactorError

    model = Net()
    with torch.no_grad():
        model.again.weight[0, 0] = float("nan")
    with pytest.raises(FactorError, match=r"again\.weight \(Linear\)(.|\n)*1 of 1296"):
        apply_plan(model, _plan(model))


def test_a_changed_model_is_refused() -> None:
    model = Net()
    plan = _plan(model)
    model.last = nn.Linear(36, 7)
    with pytest.raises(PlanError, match="36 -> 7"):
        apply_plan(model, plan)
    other = Net().double()
    assert fingerprint(other) != plan.fingerprint
    with pytest.raises(PlanError, match="as planned"):
        apply_plan(other, plan)


def test_the_structure_alone_takes_no_weights() -> None:
    model = Net()
    empty = apply_plan(model, _plan(model), structure_only=True).model
    assert all(p.is_meta for p in empty.parameters())
    assert sum(p.numel() for p in empty.parameters()) == _plan(model).params.after


def test_a_model_that_cannot_be_copied_is_named() -> None:
    model = Net()
    model.lock = __import__("threading").Lock()  # shared by the copy
    assert _plan(model).converted
    model.steps = (step for step in range(3))
    with pytest.raises(PlanError, match="cannot be copied") as caught:
        _plan(model)
    assert caught.value.where == "steps"


def test_a_widened_weight_too_large_to_build_starts_from_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import bp_convert
    from bp_convert import surgery

    monkeypatch.setattr(surgery, "LARGEST", 1000)
    model = nn.Sequential(nn.Linear(16, 36), nn.ReLU(), nn.Linear(36, 5))
    asked = {"alpha": 2, "inputs": ["16"], "exclude": "2", "init": "warm"}
    plan = bp_convert.plan(model, **asked)  # of repeats: never built
    assert not any("too large" in note for note in plan.layers[0].notes)
    assert bp_convert.convert(model, plan=plan)[1].fit_errors
    plan = bp_convert.plan(model, **asked, rank=10**6, convert_anyway=True)
    layer = plan.layers[0]
    assert any("too large to be built" in note for note in layer.notes)
    assert any("does not keep the function" in note for note in plan.notes)
    _, report = bp_convert.convert(model, plan=plan)
    assert not report.fit_errors
    assert sum("starts from noise" in note for note in report.layers[0].notes) == 1
    assert "train it" in report.verdict
