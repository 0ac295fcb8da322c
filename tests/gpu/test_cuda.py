"""The same layers and conversions on a CUDA device; run with ``pytest -m gpu``."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import bp_convert
from bp_convert.kinds import Ask, Spread
from bp_convert.layers.linear import BPLinear
from bp_convert.ways.fused import run
from tests.contract.cases import CASES, Case, kind, output
from tests.search.models import Words, cnn, examples, images, mlp, vectors
from tests.tolerances import assert_near

pytestmark = pytest.mark.gpu
EVERY = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(autouse=True)
def _exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def _twin(case: Case, rank: int) -> tuple[nn.Module, nn.Module]:
    dense = case.make().cuda()
    one = kind(case)
    widths = one.widths(dense)
    twin = one.build(dense, widths, one.factor(dense, widths, Ask(rank=rank)), "cuda")
    one.fill(dense, twin, Spread())
    return dense.eval(), twin.eval()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rows", [1, 37, 2048])
def test_the_fused_kernel_gives_what_two_products_give(dtype: torch.dtype, rows: int) -> None:
    pytest.importorskip("triton")
    torch.backends.cuda.matmul.allow_tf32 = True
    layer = BPLinear(768, 3072, rank=2, device="cuda", dtype=dtype).eval()
    x = torch.randn(rows, 768, device="cuda", dtype=dtype)
    with torch.no_grad():
        wanted = layer(x).float()
        made = run(x, layer.w1, layer.w2, layer.bias, layer.factors).float()
        layer.way = "fused"
        assert torch.equal(layer(x).float(), made)
    assert float((made - wanted).norm() / wanted.norm()) < 2e-2


@EVERY
@pytest.mark.parametrize("rank", [1, 3])
def test_the_twin_is_the_dense_layer_of_its_own_weights(case: Case, rank: int) -> None:
    _, twin = _twin(case, rank)
    x = case.draw(torch.float32).cuda()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = output(twin, x)
    assert y.is_cuda
    assert_near(y.cpu(), output(twin.to_dense(), x).cpu())  # type: ignore[operator]


@EVERY
def test_full_rank_reproduces_the_layer(case: Case) -> None:
    dense, twin = _twin(case, 10**6)
    x = case.draw(torch.float32).cuda()
    assert_near(output(twin, x).cpu(), output(dense, x).cpu())


@EVERY
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision_trains(case: Case, dtype: torch.dtype) -> None:
    _, twin = _twin(case, 2)
    twin.train()
    x = case.draw(torch.float32).cuda()
    with torch.autocast("cuda", dtype):
        loss = output(twin, x).float().square().mean()
    loss.backward()
    for name, parameter in twin.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name


@pytest.mark.parametrize("asked", [{"rank": 10**9}, {"alpha": 2, "rank": 10**9}], ids=str)
def test_a_model_on_the_device_is_converted_there(asked: dict[str, int]) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 64, 16),
        nn.Linear(16, 5),
    )
    model = model.cuda().eval()
    small, report = bp_convert.convert(model, inputs=["3x8x8"], convert_anyway=True, **asked)
    assert all(parameter.is_cuda for parameter in small.parameters())
    assert report.verification is not None
    assert report.verification.output_error is not None
    assert report.verification.output_error < 1e-4


def test_latency_and_peak_memory_are_measured() -> None:
    model = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10))
    _, report = bp_convert.convert(
        model, inputs=["4096"], pairs="paper", device="cuda", measure=(32,)
    )
    one = report.latency[0]
    assert one.device != "CPU"
    assert one.dense_peak_bytes is not None
    assert one.converted_peak_bytes is not None
    assert one.converted_peak_bytes < one.dense_peak_bytes


TARGETS = pytest.mark.parametrize("targets", [("params=0.4",), ("error=0.2",)], ids=str)


@TARGETS
@pytest.mark.parametrize("by_data", [False, True], ids=["weights", "data"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "words"])
def test_a_target_is_met_on_the_device(name: str, by_data: bool, targets: tuple[str, ...]) -> None:
    """Planned and fitted on the CPU, tried and run where the model is: the same choice as there."""
    make, data, inputs = {
        "mlp": (lambda: mlp(48, 60, 72, 10), vectors(200, 48), "48"),
        "cnn": (cnn, images(64), "3x12x12"),
        "words": (Words, torch.randint(1, 90, (40, 9)), "int64:1x9<90"),
    }[name]
    torch.manual_seed(0)
    model = make().eval()  # type: ignore[operator]
    asked: dict[str, Any] = {"target": targets, "inputs": [inputs], "convert_anyway": True}
    if by_data:
        asked["calibrate"] = examples(data)
    here, expected = bp_convert.convert(model, **asked)
    there, report = bp_convert.convert(model.cuda(), **asked)
    assert all(t.is_cuda for t in (*there.parameters(), *there.buffers()))
    assert report.plan.settings.target == expected.plan.settings.target
    chosen = {one.name: one.factors for one in expected.layers}
    assert {one.name: one.factors for one in report.layers} == chosen
    assert any(chosen.values())
    x = data[:8]
    with torch.no_grad():
        assert_near(there.cpu()(x), here.cpu()(x), torch.bfloat16)
        first = bp_convert.convert(model, **asked)[0](x.cuda())  # and again, as it is deterministic
    assert first.is_cuda


def test_calibration_data_may_be_on_the_device() -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16)).cuda().eval()
    small, report = bp_convert.convert(
        model, rank=0.5, calibrate=torch.randn(128, 32, device="cuda"), convert_anyway=True
    )
    assert all(parameter.is_cuda for parameter in small.parameters())
    assert report.calibration
