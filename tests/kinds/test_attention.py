"""nn.MultiheadAttention as one layer: torch's on every option, in torch's own encoders, fitted."""

from __future__ import annotations

import copy
import itertools
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bp_convert
from bp_convert import BPMultiheadAttention, FactorError, FactorSpec, Settings
from bp_convert.kinds import kind_of
from bp_convert.kinds.choices import whole
from bp_convert.layers import BPLinear
from bp_convert.planner import prepare
from bp_convert.surgery import apply_plan, check
from tests.tolerances import assert_near

FULL = 10**6
FLAGS = list(itertools.product((None, 10), (True, False), (True, False), (True, False)))


def _drawn(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter)


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize(("kdim", "extras", "bias", "first"), FLAGS)
def test_it_is_torchs_on_every_option(
    kdim: int | None, extras: bool, bias: bool, first: bool
) -> None:
    """Extras are one more key and value, and zeros; dropout draws the same numbers."""
    dense = nn.MultiheadAttention(
        24, 4, 0.3, bias, extras, extras, kdim, None if kdim is None else 14, first
    ).double()
    _drawn(dense)
    twin = BPMultiheadAttention.from_dense(dense, rank=FULL)
    assert twin.extra_repr().startswith("24, 4")
    ways = [
        *itertools.product(
            (True, False),  # training
            (3, 1, None),  # sequences
            (True, False) if kdim is None else (False,),  # self-attention
            ((True, True), (True, False), (False, True)),  # weights, averaged
            ("none", "causal", "bool", "float", "each"),  # mask
            ("none", "bool", "float"),  # padding
        )
    ]
    for training, batch, alone, (weights, average), mask, padding in random.Random(0).sample(
        ways, 50
    ):
        given, named = _call(first, batch, alone, mask, padding, kdim)
        named.update(need_weights=weights, average_attn_weights=average)
        outputs = []
        for module in (dense, twin):
            torch.manual_seed(1)
            outputs.append(module.train(training)(*given, **named))
        (expected, found), (maps, mine) = zip(*outputs, strict=True)
        assert_near(found, expected)
        assert (maps is None) == (mine is None)
        if maps is not None:
            assert_near(mine, maps)


def _call(
    first: bool, batch: int | None, alone: bool, mask: str, padding: str, kdim: int | None
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    many, steps, keys = batch or 1, 5, 5 if alone else 7
    sizes = (
        [(steps, 24)] if alone else [(steps, 24), (keys, kdim or 24), (keys, 14 if kdim else 24)]
    )
    drawn = [torch.randn(many, *size, dtype=torch.float64) for size in sizes]
    laid = [x[0] if batch is None else x if first else x.transpose(0, 1) for x in drawn]
    named: dict[str, Any] = {"is_causal": mask == "causal"}
    if mask in ("causal", "bool"):
        named["attn_mask"] = torch.ones(steps, keys, dtype=torch.bool).triu(1)
    elif mask != "none":
        shape = (steps, keys) if mask == "float" else (many * 4, steps, keys)
        named["attn_mask"] = torch.randn(shape, dtype=torch.float64)
    if padding != "none":
        pads = torch.zeros(many, keys, dtype=torch.bool)
        pads[0, -2:] = True
        pads = pads if batch else pads[0]
        minus = torch.zeros(pads.shape, dtype=torch.float64).masked_fill(pads, float("-inf"))
        named["key_padding_mask"] = minus if padding == "float" else pads
    return tuple(laid * 3 if alone else laid), named


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_nested_sequences_are_those_of_torchs_fused_path() -> None:
    dense = nn.MultiheadAttention(24, 4, batch_first=True).double().eval()
    _drawn(dense)
    twin = BPMultiheadAttention.from_dense(dense, rank=FULL)
    x = torch.nested.nested_tensor([torch.randn(n, 24).double() for n in (3, 5)])
    with torch.no_grad():
        for named in ({}, {"need_weights": False}, {"average_attn_weights": False}):
            expected, found = dense(x, x, x, **named), twin(x, x, x, **named)
            for one, two in zip(expected[0].unbind(), found[0].unbind(), strict=True):
                assert_near(two, one)
            if expected[1] is not None:
                assert_near(found[1], expected[1])
    with pytest.raises(ValueError, match="no mask"):
        twin(x, x, x, attn_mask=torch.zeros(5, 5))


def test_what_it_does_not_take_is_named() -> None:
    twin, x = BPMultiheadAttention(24, 4), torch.randn(5, 24)
    with pytest.raises(ValueError, match="give that mask"):
        twin(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match="booleans or floats"):
        twin(x, x, x, attn_mask=torch.ones(5, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="2 axes each"):
        twin(x[None], x, x)
    with pytest.raises(FactorError, match="divide the width"):
        BPMultiheadAttention(24, 5)
    with pytest.raises(FactorError, match="one FactorSpec for each of q, k, v, out"):
        BPMultiheadAttention(24, 4, factors={"q": whole(24, 24)})


def test_a_fresh_one_varies_as_torchs_and_keeps_what_is_left_whole() -> None:
    torch.manual_seed(0)
    one = FactorSpec(out=(16, 16), inp=(16, 16), rank=8)
    twin = BPMultiheadAttention(
        256, 4, factors={"q": one, "k": whole(256, 256), "v": one, "out": one}
    )
    assert isinstance(twin.q_proj, BPLinear)
    assert type(twin.k_proj) is nn.Linear
    dense = nn.MultiheadAttention(256, 4)
    for role, (mine, theirs) in enumerate(
        zip(twin.in_proj_weight.chunk(3), dense.in_proj_weight.chunk(3), strict=True)
    ):
        assert float((mine.std() / theirs.std()).detach()) == pytest.approx(1, abs=0.1), role
    assert not twin.in_proj_bias.any()


# In models


class Tower(nn.Module):
    def __init__(self, **more: Any) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **more)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.pool = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        x = self.encoder(x, src_key_padding_mask=src_key_padding_mask)
        x, _ = self.pool(x[:, :1], x, x, need_weights=False)
        return self.head(x[:, 0])


def _tower(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    return Tower(**more).eval()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:.*nested tensors")
@pytest.mark.parametrize("more", [{}, {"norm_first": True, "activation": "gelu"}], ids=str)
def test_torchs_encoder_is_the_same_with_padding_at_full_rank(more: dict[str, Any]) -> None:
    """In eval mode torch makes nested tensors of what is padded, and runs fused kernels."""
    model = _tower(**more)
    small, report = bp_convert.convert(model, inputs=["7x32"], rank=FULL, convert_anyway=True)
    kinds = [one.kind for one in report.plan.converted]
    assert kinds.count("MultiheadAttention") == 3
    assert report.verification is not None
    assert "eval mode with a padding mask" in report.verification.ways
    x, pads = torch.randn(3, 7, 32), torch.zeros(3, 7, dtype=torch.bool)
    pads[0, 5:] = pads[1, 3:] = True
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            for given in ((x,), (x, pads)):
                assert_near(small(*given), model(*given), torch.float32)
    widths = {one.name: one.params for one in report.plan.layers}
    held = sum(p.numel() for p in small.encoder.layers[0].self_attn.parameters())
    assert widths["encoder.layers.0.self_attn"] == (4 * 32 * 33, held)


@pytest.mark.slow
def test_a_target_is_met_by_each_projection_of_its_own() -> None:
    torch.manual_seed(0)
    model = nn.Transformer(32, 4, 1, 1, 64, batch_first=True).eval()
    with torch.no_grad():  # keys of the decoder's cross attention are nothing to lose
        model.decoder.layers[0].multihead_attn.in_proj_weight[32:64] *= 1e-3
    data = [(torch.randn(6, 32), torch.randn(5, 32)) for _ in range(48)]
    settings = Settings(target="params=0.6", convert_anyway=True)
    small, report = bp_convert.convert(model, settings, calibrate=data)
    blind, _ = bp_convert.convert(model, settings, inputs=[one[None] for one in data[0]])
    layer = report.plan.layer("decoder.layers.0.multihead_attn")
    assert layer is not None
    assert layer.action == "replaced"
    assert len({spec.params for spec in layer.factors.values()}) > 1
    fresh = [torch.randn(64, 6, 32), torch.randn(64, 5, 32)]
    with torch.no_grad():
        gaps = [float((one(*fresh) - model(*fresh)).square().mean()) for one in (small, blind)]
    assert gaps[0] < gaps[1]


def test_counted_multiply_adds_are_those_of_the_run() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model = nn.Transformer(32, 4, 1, 1, 64, batch_first=True).eval()
    given = [torch.randn(1, 6, 32), torch.randn(1, 5, 32)]
    small, report = bp_convert.convert(
        model, inputs=given, rank=0.5, ways="factored", convert_anyway=True
    )
    with FlopCounterMode(display=False) as counter:
        small.to("meta")(*(one.to("meta") for one in given))
    assert report.plan.macs is not None
    assert counter.get_total_flops() == 2 * report.plan.macs.after


@pytest.mark.slow
def test_it_is_saved_reloaded_elsewhere_and_turned_back(tmp_path: Path) -> None:
    small, _ = bp_convert.convert(_tower().encoder, inputs=["7x32"], rank=0.5, convert_anyway=True)
    bp_convert.save(small, tmp_path / "small.pt")
    x = torch.randn(2, 7, 32)
    torch.save(x, tmp_path / "x.pt")
    code = (
        "import bp_convert, torch; torch.set_num_threads(1)\n"
        "y = bp_convert.load('small.pt')(torch.load('x.pt'))\n"
        "torch.save(y.detach(), 'y.pt')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert_near(torch.load(tmp_path / "y.pt"), small(x).detach(), torch.float32)
    dense = bp_convert.to_dense(small)
    assert type(dense.layers[1].self_attn) is nn.MultiheadAttention
    assert_near(dense(x), small(x), torch.float32)


def test_a_plan_that_names_its_projection_as_a_layer_still_loads() -> None:
    model = _tower()
    plan = prepare(model, Settings(inputs=("7x32",), convert_anyway=True)).plan
    out = plan.layers[0].model_copy(
        update={
            "name": "encoder.layers.0.self_attn.out_proj", "kind": "Linear", "action": "kept",
            "factors": {}, "params": (1056, 1056),
        }
    )  # fmt: skip
    others = tuple(one for one in plan.layers if one.kind == "Linear")
    old = plan.model_copy(update={"layers": (out, *others)})
    check(model, old)
    kept = apply_plan(model, old).model
    assert type(kept.get_submodule("encoder.layers.0.self_attn")) is nn.MultiheadAttention


@pytest.mark.parametrize("kdim", [None, 20])
def test_alpha_widens_around_it(kdim: int | None) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.side = nn.Linear(7, 24), nn.Linear(7, kdim or 24)
            self.mix = nn.MultiheadAttention(24, 4, kdim=kdim, vdim=kdim, batch_first=True)
            self.last = nn.Linear(24, 5)

        def forward(self, x: Tensor) -> Tensor:
            keys = self.side(x)
            return self.last(self.mix(self.stem(x), keys, keys)[0])

    torch.manual_seed(0)
    model = Net().double().eval()
    _drawn(model)
    settings = Settings(inputs=("5x7",), alpha=2, rank=FULL, convert_anyway=True)
    small, report = bp_convert.convert(model, settings)
    layer = report.plan.layer("mix")
    assert layer is not None
    assert layer.after == (48, 48)
    assert layer.action == ("replaced" if kdim is None else "widened")
    assert ("of a width of their own" in layer.reason) == (kdim is not None)
    if kdim is None:
        assert any("keeps the function" in note for note in report.plan.notes)
        x = torch.randn(3, 5, 7, dtype=torch.float64)
        assert_near(small(x), model(x), torch.float32)


def test_a_subclass_with_a_forward_of_its_own_stays() -> None:
    class Mine(nn.MultiheadAttention):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, x, x)[0]

    model = nn.Sequential(nn.Linear(8, 24), Mine(24, 4, batch_first=True), nn.Linear(24, 5))
    assert kind_of(model[1]) is None
    plan = bp_convert.plan(model, inputs=["5x8"], rank=2, convert_anyway=True)
    layer = plan.layer("1.out_proj")
    assert layer is not None
    assert layer.reason == "nn.MultiheadAttention reads its weight without calling it"


def test_ties_and_forwards_of_a_part_keep_the_whole() -> None:
    model = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 24))
    model.mix = nn.MultiheadAttention(24, 4)
    model.mix.out_proj.weight = model[1].weight
    reasons = {one.name: one.reason for one in bp_convert.plan(model).layers}
    assert reasons["mix"] == "its out_proj.weight is tied to 1.weight"
    model.mix.out_proj = nn.Linear(24, 24)
    model.mix.out_proj.forward = lambda x: x
    reasons = {one.name: one.reason for one in bp_convert.plan(model).layers}
    assert reasons["mix"] == "in its out_proj: its forward is replaced on the instance"


@pytest.mark.parametrize("batch_first", [False, True])
def test_dropout_behind_it_draws_as_behind_torch_s(batch_first: bool) -> None:
    torch.manual_seed(0)
    dense = nn.TransformerEncoderLayer(24, 2, 16, dropout=0.5, batch_first=batch_first)
    twin = copy.deepcopy(dense)
    twin.self_attn = BPMultiheadAttention.from_dense(dense.self_attn, rank=10**6)
    x = torch.randn(3, 5, 24)
    answers = []
    for layer in (dense.train(), twin.train()):
        torch.manual_seed(1)
        answers.append(layer(x))
    assert_near(answers[1], answers[0])
