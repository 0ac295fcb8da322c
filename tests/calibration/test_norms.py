"""Batch norms follow what conversion changed in their inputs, and nothing else."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bp_convert.calibration.norms import LEAST, MOST, settle_norms
from tests.tolerances import assert_near

F32 = torch.float32


def _net(blocks: int = 4) -> nn.Sequential:
    """Convolutions and norms in a row, which have seen other data than the tests'."""
    layers: list[nn.Module] = []
    for number in range(blocks):
        layers += [
            nn.Conv2d(8 if number else 3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
        ]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 36, 5), nn.BatchNorm1d(5))
    with torch.no_grad():
        for _ in range(30):
            model.train()(1.3 * torch.randn(32, 3, 6, 6) + 0.2)
    return model.eval()


@torch.no_grad()
def _disturbed(model: nn.Module, by: float = 0.1) -> nn.Module:
    other = deepcopy(model)
    for module in other.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.weight.mul_(0.8).add_(by * module.weight.std() * torch.randn_like(module.weight))
    return other


def _batches(x: Tensor, size: int = 16) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return [((part,), {}) for part in x.split(size)]


@torch.no_grad()
def _moments(model: nn.Module, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Return mean and variance of what each norm gets, from all data at once."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(name: str) -> Any:
        def keep(_: nn.Module, args: Any) -> None:
            flat = args[0].double().transpose(0, 1).flatten(1)
            found[name] = flat.mean(1), flat.var(1, correction=0)

        return keep

    handles = [
        module.register_forward_pre_hook(hook(name))
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    model.eval()(x)
    for handle in handles:
        handle.remove()
    return found


def _norms(model: nn.Module) -> dict[str, nn.modules.batchnorm._BatchNorm]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    }


def test_every_norm_moves_by_what_its_inputs_moved() -> None:
    """In the settled model itself: what a norm gets hangs on the norms before it."""
    source = _net()
    converted = _disturbed(source)
    x = torch.randn(64, 3, 6, 6)
    settle_norms(source, converted, _batches(x, 64))
    before, after = _moments(source, x), _moments(converted, x)
    for name, norm in _norms(converted).items():
        old = source.get_submodule(name)
        assert isinstance(old, nn.modules.batchnorm._BatchNorm)
        moved = norm.running_mean - old.running_mean  # type: ignore[operator]
        assert_near(moved.double(), after[name][0] - before[name][0], torch.float16)
        scaled = norm.running_var / old.running_var  # type: ignore[operator]
        assert_near(scaled.double(), after[name][1] / before[name][1], torch.float16)
        assert float(moved.abs().max()) > 1e-3


def test_batches_make_little_difference() -> None:
    source = _net()
    x = torch.randn(128, 3, 6, 6)
    whole, parts = _disturbed(source), None
    parts = deepcopy(whole)
    settle_norms(source, whole, _batches(x, 128))
    settle_norms(source, parts, _batches(x, 16))
    for one, two in zip(_norms(whole).values(), _norms(parts).values(), strict=True):
        assert one.running_mean is not None
        assert two.running_mean is not None
        assert one.running_var is not None
        assert two.running_var is not None
        spread = one.running_var.sqrt()
        assert float(((one.running_mean - two.running_mean) / spread).abs().max()) < 0.1
        assert float((one.running_var / two.running_var).log().abs().max()) < 0.1


def test_a_settled_model_is_nearer_to_its_source() -> None:
    source = _net()
    converted = _disturbed(source)
    x, unseen = torch.randn(128, 3, 6, 6), torch.randn(64, 3, 6, 6)
    with torch.no_grad():
        expected = source(unseen)
        before = float((converted(unseen) - expected).norm())
        settle_norms(source, converted, _batches(x))
        after = float((converted.eval()(unseen) - expected).norm())
    assert after < 0.7 * before


def test_what_did_not_change_stays_to_the_last_bit() -> None:
    source = _net().train()
    same = deepcopy(source)
    state = {n: t.clone() for n, t in source.state_dict().items()}
    settle_norms(source, same, _batches(5 + 3 * torch.randn(32, 3, 6, 6)))
    for model in (source, same):
        assert all(torch.equal(state[n], t) for n, t in model.state_dict().items())
        assert all(m.training for m in model.modules())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_only_norms_are_written_to() -> None:
    source = _net(2)
    converted = _disturbed(source)
    state = {n: t.clone() for n, t in converted.state_dict().items()}
    settle_norms(source, converted, _batches(torch.randn(32, 3, 6, 6)))
    changed = {n for n, t in converted.state_dict().items() if not torch.equal(state[n], t)}
    assert changed == {n for n in state if n.endswith(("running_mean", "running_var"))}


def test_a_variance_that_vanished_or_exploded_is_bounded() -> None:
    source = _net(1)
    for by in (0.0, 1e6):
        converted = deepcopy(source)
        with torch.no_grad():
            converted.get_parameter("0.weight").mul_(by)
        settle_norms(source, converted, _batches(torch.randn(32, 3, 6, 6)))
        norm, old = converted.get_submodule("1"), source.get_submodule("1")
        ratio = norm.get_buffer("running_var") / old.get_buffer("running_var")
        assert bool(((ratio > 0.999 * LEAST) & (ratio < 1.001 * MOST)).all())
        assert bool(torch.isfinite(norm.get_buffer("running_mean")).all())


@pytest.mark.parametrize("count", [1, 2])
def test_one_example_is_enough_to_stay_finite(count: int) -> None:
    source = _net(2)
    converted = _disturbed(source)
    settle_norms(source, converted, _batches(torch.randn(count, 3, 6, 6)))
    assert all(bool(torch.isfinite(b).all()) for b in converted.buffers())
    assert all(float(n.running_var.min()) > 0 for n in _norms(converted).values())  # type: ignore[union-attr]


def test_norms_without_statistics_and_models_without_norms() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False))
    other = deepcopy(plain)
    settle_norms(plain, other, _batches(torch.randn(4, 3, 6, 6)))
    bare = nn.Sequential(nn.Linear(3, 3))
    settle_norms(bare, deepcopy(bare), _batches(torch.randn(4, 3)))


def test_half_precision_keeps_its_dtype() -> None:
    source = _net(1).bfloat16()
    converted = _disturbed(source)
    settle_norms(source, converted, _batches(torch.randn(32, 3, 6, 6)))
    assert {b.dtype for b in converted.buffers()} == {torch.bfloat16, torch.int64}
