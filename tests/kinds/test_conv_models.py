"""Models with transposed and with grouped convolutions: converted, widened, fitted, reloaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert.layers import BPConv2d, BPConvTranspose2d
from tests.tolerances import assert_near


class Net(nn.Module):
    """A small U-Net whose middle has groups and whose last step is told its size."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.middle = nn.Conv2d(16, 32, 3, 2, 1, groups=4)
        self.again = nn.Conv2d(32, 32, 3, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.join = nn.Conv2d(32, 16, 1)
        self.grow = nn.ConvTranspose2d(16, 8, 3, 2, 1)
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.norm(self.down(x)).relu()
        y = self.again(self.middle(skip).relu()).relu()
        y = self.join(torch.cat([skip, self.up(y)], 1)).relu()
        return self.last(self.grow(y, output_size=[2 * n for n in x.shape[2:]]).relu())


INPUT: dict[str, Any] = {"inputs": ["3x8x8"]}


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def test_full_rank_is_the_same_model_and_the_plan_counts_it() -> None:
    model, x = net(), torch.randn(2, 3, 8, 8)
    small, report = bp_convert.convert(model, **INPUT, rank=10**6, convert_anyway=True)
    kinds = {one.name: one.kind for one in report.plan.layers if one.action == "replaced"}
    assert {kinds[name] for name in ("middle", "again")} == {"Conv2d"}
    assert {kinds[name] for name in ("up", "grow")} == {"ConvTranspose2d"}
    assert isinstance(small.up, BPConvTranspose2d)
    assert isinstance(small.again, BPConv2d)
    assert_near(small(x), model(x))
    assert report.plan.params.after == sum(p.numel() for p in small.parameters())


def test_widened_at_full_rank_it_computes_the_same() -> None:
    model, x = net(), torch.randn(2, 3, 8, 8)
    settings: dict[str, Any] = {**INPUT, "rank": 10**6, "convert_anyway": True}
    small, report = bp_convert.convert(model, alpha=2, **settings)
    after = {one.name: one.after for one in report.plan.layers if one.action == "replaced"}
    assert after["up"] == (32, 64)
    assert after["grow"] == (64, 32)
    # A group's own width follows its neighbours': its input grows, group by group.
    assert after["middle"] == (64, 32)
    assert small.middle.groups == 4
    assert_near(small(x), model(x))


def test_groups_that_the_channels_cross_start_from_noise() -> None:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
            self.grouped = nn.Conv2d(8, 12, 3, groups=2)
            self.head = nn.Linear(12, 5)

        def forward(self, x: Tensor) -> Tensor:
            both = torch.stack([self.one(x), self.two(x)], 2).flatten(1, 2)  # interleaved
            return self.head(self.grouped(both[:, ::3].repeat(1, 8, 1, 1)[:, : both.shape[1]])
                             .mean((2, 3)))  # fmt: skip

    torch.manual_seed(0)
    _, report = bp_convert.convert(
        Crossed().eval(), inputs=["3x6x6"], alpha=2, rank=2, convert_anyway=True
    )
    layer = report.plan.layer("grouped")
    assert layer is not None
    if layer.before != layer.after:
        assert any("noise" in note for note in layer.notes)


@pytest.mark.parametrize("target", ["params=0.5"])
def test_a_target_on_data_is_met_and_the_result_reloads_elsewhere(
    target: str, tmp_path: Path
) -> None:
    model, x = net(), torch.randn(48, 3, 8, 8)
    small, report = bp_convert.convert(
        model, **INPUT, target=target, calibrate=x, convert_anyway=True
    )
    before = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in small.parameters()) <= 0.5 * before
    replaced = {one.name for one in report.plan.layers if one.action == "replaced"}
    assert replaced & {"up", "grow"}
    assert replaced & {"middle", "again"}
    gap = (small(x) - model(x)).square().sum() / model(x).square().sum()
    cut, _ = bp_convert.convert(model, **INPUT, target=target, method="svd", convert_anyway=True)
    lost = (cut(x) - model(x)).square().sum() / model(x).square().sum()
    assert gap < 0.8 * lost  # what was fitted to data beats what was not
    bp_convert.save(small, tmp_path / "small.pt")
    torch.save(x[:2], tmp_path / "x.pt")
    code = (
        "import bp_convert, torch; torch.set_num_threads(1)\n"
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "import tests.kinds.test_conv_models\n"
        "model = bp_convert.load('small.pt', trust=['tests'])\n"
        "torch.save(model(torch.load('x.pt')).detach(), 'y.pt')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "y.pt"), small(x[:2]))
    dense = bp_convert.to_dense(small)
    assert type(dense.up) is nn.ConvTranspose2d
    assert_near(dense(x), small(x))
