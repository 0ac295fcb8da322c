"""Faults put into a conversion on purpose: verification finds each and names where it starts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bp_convert
from bp_convert import Settings
from bp_convert.errors import VerificationError
from bp_convert.graph.example import SampleInputs
from bp_convert.planner import prepare
from bp_convert.surgery import apply_plan
from bp_convert.values.report import Verification
from bp_convert.values.tensors import TensorSpec
from bp_convert.verify import fingerprint_of_data, verify

FULL = Settings(
    rank=10**6,
    convert_anyway=True,
    convert_head=True,
    inputs=(TensorSpec(name="x", shape=(6, 16)),),
)


class Block(nn.Module):
    """Draws, takes a mask, and has a hook on one of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 24), nn.Linear(24, 16)
        self.act = nn.GELU()

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        y = self.act(self.first(x))
        y = y + 0.1 * torch.rand_like(y)
        y = F.dropout(self.second(y), 0.2, self.training)
        return y if keep is None else y * keep[..., None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = x + block(x, attention_mask)
        return self.head(x.mean(1))


def halved(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return output / 2


def made() -> tuple[nn.Module, nn.Module, Callable[[], Verification]]:
    """Return a model, its exact conversion, and what verifies it."""
    torch.manual_seed(0)
    source = Net().eval()
    source.blocks[1].act.register_forward_hook(halved)
    plan = prepare(source, FULL).plan
    done = apply_plan(source, plan)

    def check() -> Verification:
        before = fingerprint_of_data(source)
        return verify(
            source, done.model, plan, SampleInputs(plan.inputs), new=done.new, before=before
        )

    return source, done.model, check


def test_a_sound_conversion_is_compared_in_every_way() -> None:
    source, _, check = made()
    state = copy.deepcopy(source.state_dict())
    found = check()
    assert found.ways == (
        "eval mode",
        "eval mode with a padding mask",
        "train mode",
        "eval mode on another input, after a change of its weights",
    )
    assert found.gradients
    assert found.output_error is not None
    assert found.output_error < 1e-3
    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor, state[name])
    assert source.blocks[1].act._forward_hooks


def test_a_branch_by_type() -> None:
    class Asking(Block):
        def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
            y = self.first(x)
            if isinstance(self.first, nn.Linear):
                y = torch.tanh(y)
            return self.second(y)

    torch.manual_seed(0)
    source = Net()
    source.blocks[1] = Asking()
    with pytest.raises(VerificationError, match=r"it gives blocks\.1\.second another input") as got:
        bp_convert.convert(source, FULL)
    assert got.value.where.startswith("blocks.1 (Asking)")
    assert "--exclude 'blocks.1.*'" in got.value.fix


def test_a_lost_hook() -> None:
    _, broken, check = made()
    broken.blocks[1].act._forward_hooks.clear()
    with pytest.raises(VerificationError, match="its output differs though its input") as got:
        check()
    assert got.value.where.startswith("blocks.1.act (GELU)")


def test_another_path_with_a_mask() -> None:
    _, broken, check = made()
    plain = broken.blocks[0].forward
    broken.blocks[0].forward = lambda x, keep: plain(x, None)
    with pytest.raises(VerificationError, match="padding mask") as got:
        check()
    assert got.value.where.startswith("blocks.0 (Block)")


def test_an_unequal_draw() -> None:
    _, broken, check = made()
    plain = broken.blocks[1].forward

    def forward(x: Tensor, keep: Tensor | None) -> Tensor:
        torch.rand(1)
        return plain(x, keep)

    broken.blocks[1].forward = forward
    with pytest.raises(VerificationError) as got:
        check()
    assert got.value.where.startswith("blocks.1 (Block) in eval mode")


@pytest.mark.parametrize("what", ["output", "weight"])
def test_a_stale_cache(what: str) -> None:
    _, broken, check = made()
    twin = broken.blocks[0].second
    kept: dict[str, Tensor] = {}
    plain = twin.forward

    def output(x: Tensor) -> Tensor:
        return kept.setdefault(f"{x.shape} {torch.is_grad_enabled()}", plain(x))

    def weight(x: Tensor) -> Tensor:
        if "w" not in kept:
            kept["w"] = twin.dense_weight().detach().clone()
        return F.linear(x, kept["w"], twin.bias)

    twin.forward = output if what == "output" else weight
    with pytest.raises(VerificationError) as got:
        check()
    assert got.value.where.startswith("blocks.0.second")


def test_a_layer_that_loses_its_gradient() -> None:
    _, broken, check = made()
    twin = broken.blocks[0].first
    twin.forward = lambda x: F.linear(x, twin.dense_weight().detach(), twin.bias)
    with pytest.raises(VerificationError, match=r"2 of .* new parameters receive no gradient"):
        check()


def test_a_source_that_was_written_to() -> None:
    source, _, _ = made()
    plan = prepare(source, FULL).plan
    done = apply_plan(source, plan)
    before = fingerprint_of_data(source)
    with torch.no_grad():
        source.head.bias.add_(1e-7)
    sample = SampleInputs(plan.inputs)
    with pytest.raises(VerificationError, match="changed during conversion"):
        verify(source, done.model, plan, sample, new=done.new, before=before)


class Chaos(nn.Module):
    """Doubles every rounding, once a step."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x).sigmoid()
        for _ in range(self.steps):
            hidden = 3.99 * hidden * (1 - hidden)
        return self.two(hidden)


@pytest.mark.parametrize(
    ("steps", "words"), [(22, "rounding decides"), (100, "blows rounding up")]
)  # in float32 alone, and in float64 too
def test_a_model_that_blows_rounding_up_is_no_other_function(steps: int, words: str) -> None:
    _, report = bp_convert.convert(Chaos(steps), inputs=["16"], rank=0.5, convert_anyway=True)
    assert report.verification is not None
    assert any(words in note for note in report.verification.notes), report.verification.notes


class Force(nn.Module):
    """Gives out the derivative of an energy: the last bias has no part in it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.energy = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.energy(self.two(self.one(x).tanh()).tanh()).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return force


def test_a_gradient_of_zeros_is_not_asked_for() -> None:
    full = {"rank": 10**6, "convert_anyway": True, "convert_head": True}
    small, report = bp_convert.convert(Force(), inputs=["16"], **full)
    assert report.verification is not None
    assert report.verification.gradients
    assert all(layer.action == "replaced" for layer in report.layers)
    assert small(torch.zeros(2, 16)).shape == (2, 16)
