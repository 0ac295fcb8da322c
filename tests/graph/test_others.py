"""Weights without a kind: each is listed once, and with the layers they are all of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import bp_convert
from bp_convert.errors import PlanError
from bp_convert.values.plan import Plan, grouped, largest
from bp_convert.values.tensors import TensorSpec
from tests.tiny_models import TINY


class _Experts(nn.Module):
    """Matrices in a stack, as routed models hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 8, 8))
        self.down = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nd,edk,ekj->nj", x, self.up, self.down)


class _Own(nn.Module):
    """A matrix that is nobody's layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(width, 6 * width))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.mix).unflatten(-1, (6, -1)).mean(-2)


class _Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(8))
        self.table = nn.Embedding(12, 8)
        self.first = nn.Linear(8, 8)
        self.again = self.first
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.same = self.norms[1]
        self.own = _Own(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up = nn.ConvTranspose1d(8, 8, 3)
        self.experts = _Experts()
        self.scales = nn.ParameterDict({"scale[0]": torch.ones(8)})
        self.normed = weight_norm(nn.Linear(8, 8))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight
        self.bare = _Tied(self.first.weight)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.again(self.first(self.table(ids) + self.token))
        for norm in self.norms:
            x = norm(x)
        x = self.own(self.same(x))
        x = self.attention(x, x, x)[0]
        x = self.up(x.transpose(1, 2)).transpose(1, 2)[:, :-2]
        x = self.experts(x.flatten(0, 1)).view_as(x) * self.scales["scale[0]"]
        return self.head(self.bare(self.normed(x)))


class _Tied(nn.Module):
    """Uses another module's weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def _adds_up(model: nn.Module, plan: Plan) -> None:
    for place, total in ((0, plan.params.before), (1, plan.params.after)):
        layers = sum(one.params[place] - one.shared[place] for one in plan.layers)
        assert layers + sum(one.params[place] for one in plan.others) == total
    assert plan.params.before == sum(p.numel() for p in model.parameters())


def test_every_module_with_weights_is_listed_once_with_its_reason() -> None:
    model = _Everything()
    plan = bp_convert.plan(model, inputs=["int64:1x5"])
    _adds_up(model, plan)
    found = {one.name: (one.kind, one.params[0], one.reason) for one in plan.others}
    vectors = "no kind for nn.LayerNorm: only vectors, nothing to factor"
    assert found == {
        "": ("_Everything", 8, "bare parameter token of class _Everything"),
        "norms.0": ("LayerNorm", 16, vectors),
        "norms.1": ("LayerNorm", 16, vectors),
        "norms.2": ("LayerNorm", 16, vectors),
        "own": ("_Own", 384, "bare parameter mix of class _Own"),
        "scales": ("ParameterDict", 8, "bare parameters of an nn.ParameterDict"),
        "bare": ("_Tied", 0, "its parameters are those of first"),
    }
    assert {one.name for one in plan.layers if one.kind == "Stack"} == {
        "experts.up",
        "experts.down",
    }
    assert next(one for one in plan.others if one.name == "norms.1").aliases == ("same",)
    tied = {one.name: one.shared[0] for one in plan.layers if one.shared[0]}
    assert tied == {"head": 96}
    normed = plan.layer("normed")
    assert normed is not None
    assert normed.action == "kept"
    assert normed.params == (80, 80)  # magnitudes are weights too


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [1, 2])
@pytest.mark.parametrize("name", sorted(TINY.keys() - {"packed"}))  # whose lengths are not drawn
def test_layers_and_others_are_the_whole_model(name: str, alpha: int) -> None:
    model = TINY[name].make()
    args, kwargs = TINY[name].inputs()
    specs = [_spec(one) for one in args] + [_spec(one, key) for key, one in kwargs.items()]
    _adds_up(model, bp_convert.plan(model, inputs=specs, alpha=alpha, convert_anyway=True))


def _spec(tensor: Tensor, name: str | None = None) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    high = 30 if dtype == "int64" and tensor.dim() > 1 else 4 if dtype == "int64" else None
    return TensorSpec(name=name, dtype=dtype, shape=tuple(tensor.shape[1:]), high=high)


def test_a_class_built_on_a_known_one_says_why_it_stays() -> None:
    class Mine(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) ** 2

    class Norm(nn.LayerNorm):
        pass

    plan = bp_convert.plan(nn.Sequential(Mine(4, 4), Norm(4)), inputs=["4"])
    assert [one.reason for one in (*plan.layers, *plan.others)] == [
        "Mine does not compute what nn.Linear computes (probed)",
        "no kind for Norm (an nn.LayerNorm): only vectors, nothing to factor",
    ]


def test_bilinear_layers_are_listed_when_a_result_is_looked_at_again() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
    small, _ = bp_convert.convert(model, inputs=["64"], convert_anyway=True)
    plan = bp_convert.plan(small, inputs=["64"])
    _adds_up(small, plan)
    assert [(one.name, one.reason) for one in plan.others] == [("0", "bilinear already")]


def test_plans_of_before_have_none() -> None:
    plan = bp_convert.plan(_Everything(), inputs=["int64:1x5"])
    old = plan.model_dump(mode="json", by_alias=True)
    del old["others"]
    for layer in old["layers"]:
        del layer["shared"]
    assert Plan.model_validate(old).others == ()


def _refused(**asked: Any) -> str:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), _Own(64), nn.LayerNorm(64))
    with pytest.raises(PlanError) as caught:
        bp_convert.plan(model, inputs=["5x64"], target="params=0.05", **asked)
    return caught.value.fix


def test_a_target_out_of_reach_names_what_holds_the_weights() -> None:
    fix = _refused()
    assert "1 _Own (74 % of the parameters)" in fix
    assert "--exclude" not in fix
    assert "LayerNorm" not in fix  # less than a hundredth
    assert "fewer --exclude" in _refused(exclude=["1"])


def test_groups_are_by_class_and_reason_the_largest_first() -> None:
    others = bp_convert.plan(_Everything(), inputs=["int64:1x5"]).others
    groups = grouped(others, 2000)
    assert next((one.kind, one.params, len(one.names)) for one in groups) == ("_Own", 384, 1)
    (norms,) = [one for one in groups if one.kind == "LayerNorm"]
    assert (norms.params, norms.names) == (48, ("norms.0", "norms.1", "norms.2"))
    assert norms.share == pytest.approx(0.024)
    assert largest(others, 2000, most=1) == "1 _Own (19 % of the parameters)"
