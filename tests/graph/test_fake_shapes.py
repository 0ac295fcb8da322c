"""Norms and rectifiers that run by shape alone give what torch's own give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bp_convert.fakes.fake import FakeMode, call
from bp_convert.fakes.fake_run import FakeRun

CASES = {
    "norm": (nn.BatchNorm2d(6), (2, 6, 4, 4)),
    "no weights": (nn.BatchNorm1d(6, affine=False), (2, 6, 4)),
    "no statistics": (nn.BatchNorm1d(6, track_running_stats=False), (3, 6)),
    "clipped": (nn.ReLU6(), (2, 6)),
    "in place": (nn.Hardtanh(-2, 2, inplace=True), (2, 6)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("training", [False, True])
def test_the_same_shape(name: str, training: bool) -> None:
    layer, shape = CASES[name]
    found = FakeRun(nn.Sequential(layer)).run((torch.zeros(shape),), {}, training=training)
    assert list(found.values()) == [shape]


def test_a_step_in_place_is_seen() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> bool:
            return nn.functional.hardtanh(x, inplace=True) is x

    assert call(Net(), FakeMode(), (torch.zeros(2),), {}, training=False)


@pytest.mark.parametrize("channels", [5, 7])
def test_another_number_of_channels_is_an_error(channels: int) -> None:
    mode = FakeMode()
    layer = nn.BatchNorm2d(6)
    given = (torch.zeros(2, channels, 4, 4),)
    with pytest.raises(RuntimeError, match=f"should contain {channels} elements not 6"):
        call(layer, mode, given, {}, training=False)
    with pytest.raises(RuntimeError, match=f"should contain {channels} elements not 6"):
        layer.eval()(*given)
