"""The kernel that makes both products: in Triton's interpreter, compiled without a GPU, priced."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert.errors import PlanError
from bp_convert.kinds import Ask, kind_of, predict
from bp_convert.layers.linear import BPLinear
from bp_convert.prices import priced, shipped
from bp_convert.tuning import fused_prices
from bp_convert.tuning.machine_table import Host, MachineTable, write_table
from bp_convert.values.factors import FactorSpec
from bp_convert.ways import fused
from tests.tolerances import assert_near

SQUARE = FactorSpec(out=(24, 32), inp=(16, 48), rank=2)

INTERPRETED = """
import torch
from bp_convert.layers.linear import BPLinear
from bp_convert.values.factors import FactorSpec
from bp_convert.ways.fused import fits, run

for dtype, off in ((torch.float32, 1e-5), (torch.float16, 5e-3)):
    for out, inp, rank, rows, bias in (
        ((24, 32), (16, 48), 1, 5, True), ((10, 20), (9, 40), 3, 7, True),
        ((100, 70), (17, 65), 2, 1, False), ((8, 8), (128, 8), 1, 3, True),
        ((16, 16), (16, 16), 4, 33, False),
    ):
        spec = FactorSpec(out=out, inp=inp, rank=rank)
        layer = BPLinear(inp[0] * inp[1], out[0] * out[1], bias, factors=spec, dtype=dtype)
        x = torch.randn(2, rows, layer.in_features, dtype=dtype)
        assert fits(spec)
        with torch.no_grad():
            made = run(x, layer.w1, layer.w2, layer.bias, spec)
            wanted = layer.double()(x.double())
        assert made.dtype == dtype and made.shape == wanted.shape
        assert (made - wanted).norm() <= off * wanted.norm(), (dtype, spec)
print("all near")
"""

COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from bp_convert.values.factors import FactorSpec
from bp_convert.ways.fused import Blocks
from bp_convert.ways.fused_kernel import two_products

spec = FactorSpec(out=(48, 64), inp=(24, 32), rank=1)
blocks, names = Blocks.of(spec), two_products.arg_names
for capability, dtype, precision in ((80, "bf16", "ieee"), (90, "fp32", "tf32")):
    fixed = dict(
        K1=48, K2=64, D1=24, D2=32, RANK=1, BIASED=True, PRECISION=precision, ROWS=blocks.rows,
        K1_BLOCK=blocks.k1, K2_BLOCK=blocks.k2, D1_ALL=blocks.d1, D2_BLOCK=blocks.d2,
    )
    kinds = {n: "constexpr" if n in fixed else "i32" if n == "rows" else "*" + dtype for n in names}
    source = ASTSource(
        fn=two_products, signature=kinds,
        constexprs={(names.index(name),): value for name, value in fixed.items()},
    )
    made = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": blocks.warps}
    )
    assert "mma" in made.asm["ptx"], "no tensor cores"
    assert made.metadata.shared <= 99 * 1024
print("compiled")
"""


def _in_a_process(code: str, **env: str) -> str:
    pytest.importorskip("triton", reason="torch for CPUs alone comes without Triton")
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "0", **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_kernel_gives_what_two_products_give() -> None:
    assert "all near" in _in_a_process(INTERPRETED, TRITON_INTERPRET="1")


def test_the_kernel_compiles_to_tensor_cores_without_a_gpu() -> None:
    assert "compiled" in _in_a_process(COMPILED)


@pytest.mark.parametrize(
    ("out", "inp", "fit"),
    [
        ((24, 32), (16, 48), True),
        ((768, 1), (1, 768), False),  # low rank: two plain products
        ((4, 192), (24, 32), False),  # most of a block would be padding
        ((24, 32), (256, 8), False),  # more than one block of d1
    ],
)
def test_what_it_is_made_for(out: Any, inp: Any, fit: bool) -> None:
    assert fused.fits(FactorSpec(out=out, inp=inp)) is fit


def test_on_a_cpu_a_fused_layer_runs_on_its_factors() -> None:
    layer = BPLinear(768, 768, factors=SQUARE).eval()
    x = torch.randn(3, 768)
    with torch.no_grad():
        expected = layer(x)
        layer.way = "fused"
        assert torch.equal(layer(x), expected)


def _takes_all(monkeypatch: pytest.MonkeyPatch, run: Callable[..., Tensor]) -> None:
    monkeypatch.setattr(fused, "takes", lambda x: not torch.is_grad_enabled())
    monkeypatch.setattr(fused, "run", run)


def test_it_is_asked_for_inference_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    _takes_all(monkeypatch, lambda x, *_: torch.full((*x.shape[:-1], 768), 7.0))
    layer = BPLinear(768, 768, factors=SQUARE).eval()
    x = torch.randn(3, 768)
    with torch.no_grad():
        assert not (layer(x) == 7).any()
        layer.way = "fused"
        assert (layer(x) == 7).all()
        assert not (layer.train()(x) == 7).any()
    assert not (layer.eval()(x) == 7).any()  # gradients are wanted


def test_a_kernel_that_fails_is_told_of_once_and_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Tensor:
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr(fused, "_FAILED", set())
    _takes_all(monkeypatch, broken)
    layer = BPLinear(768, 768, factors=SQUARE).eval()
    x = torch.randn(3, 768)
    with torch.no_grad():
        expected = layer(x)
        layer.way = "fused"
        with pytest.warns(UserWarning, match="out of shared memory"):
            assert torch.equal(layer(x), expected)
        assert torch.equal(layer(x), expected)  # no second warning, which would be an error


def _clock(passes: Sequence[Callable[[], Any]], device: torch.device) -> list[float]:
    """Take 2 microseconds a call, and 1 for each row."""
    return [2.0 + len(one.args[0]) for one in passes]  # type: ignore[attr-defined]


def _exact(
    x: Tensor, w1: Tensor, w2: Tensor, bias: Tensor | None, spec: FactorSpec, times: float = 1.0
) -> Tensor:
    plain = BPLinear(x.shape[-1], w1.shape[1] * w2.shape[2], factors=spec).eval()
    plain.load_state_dict({"w1": w1, "w2": w2, "bias": bias})
    return times * plain(x)


@torch.no_grad()
def test_prices_come_of_a_kernel_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, widths = torch.device("cpu"), [(256, 256), (256, 1024)]
    assert fused_prices.fused_prices(cpu, torch.float32, _clock, widths) == {}  # no CUDA device
    _takes_all(monkeypatch, _exact)
    found = fused_prices.fused_prices(cpu, torch.float32, _clock, widths)
    assert set(found) == {"Linear.fused"}
    _takes_all(monkeypatch, lambda *given: _exact(*given, times=1.1))
    assert fused_prices.fused_prices(cpu, torch.float32, _clock, widths) == {}


def test_the_planner_takes_it_where_it_was_measured_to_be_faster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BP_CONVERT_CACHE", str(tmp_path))
    model = nn.Sequential(nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 10))
    settings: Any = {"inputs": ["768"], "convert_anyway": True}
    assert {one.way for one in bp_convert.plan(model, **settings).converted} == {"factored"}
    prices = {**shipped(), "Linear.fused": {"calls": 1e-3}}
    write_table(MachineTable(Host("cpu", torch.get_num_threads(), "float32"), prices))
    plan = bp_convert.plan(model, **settings)
    assert plan.converted[0].way == "fused"
    assert any("one kernel" in note for note in plan.converted[0].notes)
    with priced(prices):
        kind = kind_of(model[0])
        assert kind is not None
        low = {"weight": FactorSpec(out=(768, 1), inp=(1, 768))}
        speed = predict(kind, model[0], (768, 768), low, [(1, 768)])
        assert speed is not None
        assert speed.way() != "fused"
    small = bp_convert.apply(model, plan)
    assert small[0].way == "fused"
    x = torch.randn(2, 768)
    with torch.no_grad():
        made = small.eval()(x)
        assert_near(made, bp_convert.run_as(small, "small")(x))


def test_a_plan_that_fuses_what_cannot_be_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(64, 64, 3), nn.Flatten())
    plan = bp_convert.plan(model, inputs=["64x8x8"], convert_anyway=True)
    layer = plan.converted[0].model_copy(update={"way": "fused"})
    with pytest.raises(PlanError, match="factored or expanded"):
        bp_convert.apply(model, plan.model_copy(update={"layers": (layer, *plan.layers[1:])}))


@pytest.mark.parametrize(
    ("module", "shape"),
    [(nn.MultiheadAttention(64, 4), (5, 2, 64)), (nn.Bilinear(16, 16, 64), (3, 16))],
    ids=["attention", "bilinear"],
)
def test_kinds_that_are_priced_as_linear_layers_are_not_fused(module: Any, shape: Any) -> None:
    kind = kind_of(module)
    assert kind is not None
    widths = kind.widths(module)
    factors = kind.factor(module, widths, Ask(rank=2))
    with priced({"Linear.fused": {"calls": 1e-9}}):
        speed = predict(kind, module, widths, factors, [shape])
    assert speed is None or speed.way() != "fused"
