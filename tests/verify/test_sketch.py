"""Plain layers without a weight: sums of their outputs tell what the weight itself would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bp_convert
from bp_convert import BPConv1d, BPConv2d, BPConv3d, BPLinear
from bp_convert.errors import VerificationError
from bp_convert.graph.example import SampleInputs
from bp_convert.planner import prepare
from bp_convert.surgery import apply_plan
from bp_convert.values.plan import Plan
from bp_convert.values.report import Verification
from bp_convert.values.settings import Settings
from bp_convert.values.tensors import TensorSpec
from bp_convert.verify import fingerprint_of_data, pair, sketch, verify
from tests.tolerances import assert_near

LAYERS = {
    "linear": (lambda: BPLinear(24, 30, rank=2), (3, 24)),
    "one row": (lambda: BPLinear(24, 30), (24,)),
    "more axes": (lambda: BPLinear(24, 30, bias=False, rank=3), (2, 3, 5, 24)),
    "few outputs": (lambda: BPLinear(24, 2), (3, 24)),
    "conv1d": (lambda: BPConv1d(8, 12, 3, padding=1, rank=2), (2, 8, 9)),
    "conv2d": (lambda: BPConv2d(8, 12, (3, 5), stride=2, padding="valid"), (2, 8, 9, 9)),
    "no batch": (lambda: BPConv2d(8, 12, 3, padding=1, padding_mode="circular"), (8, 9, 9)),
    "groups": (lambda: BPConv2d(12, 24, 3, groups=3, rank=2, dilation=2), (2, 12, 9, 9)),
    "point": (lambda: BPConv2d(12, 24, 1), (2, 12, 4, 4)),
    "conv3d": (lambda: BPConv3d(4, 6, 3, bias=False), (2, 4, 5, 5, 5)),
}
Case = tuple[Any, tuple[int, ...]]


@pytest.fixture
def twin_and_input(request: pytest.FixtureRequest) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    make, shape = LAYERS[request.param]
    return make().double(), torch.randn(shape, dtype=torch.float64)


each = pytest.mark.parametrize("twin_and_input", LAYERS, indirect=True)


@each
def test_a_layer_answers_as_its_weight(twin_and_input: tuple[Any, Tensor]) -> None:
    twin, x = twin_and_input
    found = sketch.sketch_of(twin)
    assert found is not None
    assert type(found.layer) is type(twin.to_dense())
    assert found.layer.weight.shape == twin.to_dense().weight.shape
    assert found.layer.weight.untyped_storage().nbytes() == 8
    assert_near(found.layer(x), twin.to_dense()(x))
    assert found.error < 1e-12


@each
def test_one_wrong_output_shows_in_the_sums(twin_and_input: tuple[Any, Tensor]) -> None:
    twin, x = twin_and_input
    found = sketch.sketch_of(twin)
    assert found is not None
    plain = found.fresh.forward

    def wrong(input: Tensor) -> Tensor:
        y = plain(input).clone()
        y.view(-1)[-1] *= 1.5
        return y

    found.fresh.forward = wrong
    found.layer(x)
    assert found.error > 1e-4


@each
def test_other_factors_are_taken_over(twin_and_input: tuple[Any, Tensor]) -> None:
    twin, x = twin_and_input
    found = sketch.sketch_of(twin)
    assert found is not None
    with torch.no_grad():
        twin.w2.mul_(-2)
    found.take(twin)
    assert_near(found.layer(x), twin.to_dense()(x))
    assert found.error < 1e-12


def test_what_cannot_be_compared_is_no_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    found = sketch.sketch_of(BPLinear(6, 8))
    assert found is not None
    monkeypatch.setattr(sketch, "relative", lambda *_: float("nan"))
    found.layer(torch.ones(2, 6))
    monkeypatch.undo()
    found.layer(torch.ones(2, 6))
    assert found.error == float("inf")


def test_a_gradient_leads_to_what_is_trained() -> None:
    twin = BPLinear(6, 8)
    twin.w1.requires_grad_(False)
    found = sketch.sketch_of(twin)
    assert found is not None
    assert not found.layer.weight.requires_grad
    (grad,) = torch.autograd.grad(found.layer(torch.ones(2, 6)).sum(), [found.layer.bias])
    torch.testing.assert_close(grad, torch.full((8,), 2.0))


def test_more_terms_than_sums_could_tell_apart() -> None:
    twin = BPLinear(4, 64, rank=10**6)
    assert sketch.sketch_of(twin) is None


# Whole models


class Net(nn.Module):
    """Convolutions, a norm, a layer in place, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2)
        self.norm, self.act = nn.BatchNorm2d(16), nn.ReLU(inplace=True)
        self.three, self.head = nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.two(self.act(self.one(x))))
        x = self.act(self.three(x.mean((2, 3))))
        return F.dropout(self.head(x), 0.1, self.training)


class Reading(Net):
    """Multiplies by a weight without calling the layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.two(self.act(self.one(x)))).mean((2, 3))
        return self.head(F.linear(x, self.three.weight, self.three.bias))


class Asking(Net):
    """Goes by the type of a layer."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x.tanh() if type(self.three) is nn.Linear else x


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Build no weight, however small; and tell whether one was built after all."""
    monkeypatch.setattr(sketch, "LARGEST", 0)
    found: list[bool] = []
    plain = pair.Pair.__init__

    def init(self: Any, *args: Any, sketched: bool = False) -> None:
        found.append(not sketched)
        plain(self, *args, sketched=sketched)

    monkeypatch.setattr(pair.Pair, "__init__", init)
    return found


def made(
    kind: type[nn.Module] = Net,
) -> tuple[nn.Module, nn.Module, Plan, Any]:
    torch.manual_seed(0)
    source = kind().eval()
    settings = Settings(
        alpha=2, convert_anyway=True, inputs=(TensorSpec(name="x", shape=(3, 12, 12)),)
    )
    plan = prepare(source, settings).plan
    done = apply_plan(
        source,
        plan.model_copy(
            update={
                "layers": tuple(one.model_copy(update={"init": "random"}) for one in plan.layers)
            }
        ),
    )

    def check() -> Verification:
        before = fingerprint_of_data(source)
        return verify(
            source, done.model, plan, SampleInputs(plan.inputs), new=done.new, before=before
        )

    return source, done.model, plan, check


def test_a_sound_model_is_compared_in_every_way(
    built: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, plan, check = made()
    assert {one.name for one in plan.converted} >= {"one", "two", "three"}
    without = check()
    assert built == [False]
    monkeypatch.setattr(sketch, "LARGEST", 10**9)
    assert check() == without
    assert built == [False, True]
    assert without.gradients
    assert "train mode" in without.ways


def test_a_weight_that_is_read_is_built(built: list[bool]) -> None:
    check = made(Reading)[-1]
    assert check().gradients
    assert built == [False, True]


def test_a_branch_by_type(built: list[bool]) -> None:
    check = made(Asking)[-1]
    with pytest.raises(VerificationError, match="its own output differs"):
        check()
    assert built[:2] == [False, True]


@pytest.mark.parametrize("name", ["one", "two", "three"])
def test_a_layer_that_computes_something_else(
    name: str, built: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, broken, _, check = made()
    kind = type(broken.get_submodule(name))
    plain = kind.forward

    def wrong(self: nn.Module, input: Tensor) -> Tensor:
        y = plain(self, input)
        return y + 0.01 * y.flip(0 if y.dim() < 3 else 2)

    monkeypatch.setattr(kind, "forward", wrong)
    with pytest.raises(VerificationError):
        check()
    assert built[:2] == [False, True]


def test_a_stale_cache() -> None:
    _, broken, _, check = made()
    twin: Any = broken.get_submodule("two")
    stale, bias = twin.dense_weight().detach().clone(), twin.bias
    twin.forward = lambda x: F.conv2d(x, twin.weight if twin.training else stale, bias, 2)
    with pytest.raises(VerificationError, match="after a change of its weights") as got:
        check()
    assert got.value.where.startswith("two")


def test_a_lost_gradient() -> None:
    _, broken, _, check = made()
    twin: Any = broken.get_submodule("three")
    twin.forward = lambda x: F.linear(x, twin.dense_weight().detach(), twin.bias)
    with pytest.raises(VerificationError, match="receive no gradient"):
        check()


def test_a_whole_conversion(built: list[bool]) -> None:
    _, report = bp_convert.convert(Net().eval(), alpha=2, inputs=["3x12x12"], convert_anyway=True)
    assert report.verification is not None
    assert report.verification.ran_train
    assert built == [False]
