"""GPT-2, whose layers are transformers' Conv1D."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import bp_convert
from bp_convert.layers import BPConv1D

transformers = pytest.importorskip("transformers")
IDS = ["input_ids=int64:1x8<90"]


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=48, n_layer=2, n_head=2, vocab_size=90, n_positions=32, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


def tokens(model: Any, **more: Any) -> list[int]:
    found = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False, **more)
    return list(found[0].tolist())


def test_every_layer_is_replaced_and_generates_the_same_at_full_rank() -> None:
    model = gpt2()
    small, report = bp_convert.convert(model, inputs=IDS, rank=10**6, convert_anyway=True)
    kinds = {one.name: one.kind for one in report.plan.layers if one.action == "replaced"}
    assert sum(kind == "Conv1D" for kind in kinds.values()) == 8  # four in each block
    assert isinstance(small.transformer.h[0].mlp.c_fc, BPConv1D)
    assert type(small) is type(model)
    assert tokens(small) == tokens(model)
    assert tokens(small, use_cache=False) == tokens(model)


@pytest.mark.slow
def test_it_is_saved_reloaded_elsewhere_and_turned_back(tmp_path: Path) -> None:
    small, _ = bp_convert.convert(gpt2(), inputs=IDS, rank=0.5, convert_anyway=True)
    bp_convert.save(small, tmp_path / "small.pt")
    code = (
        "import bp_convert, torch, sys; torch.set_num_threads(1)\n"
        "model = bp_convert.load('small.pt', trust=['transformers'])\n"
        "ids = torch.tensor([[5, 6, 7]])\n"
        "print(model.generate(ids, max_new_tokens=8, do_sample=False)[0].tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(tokens(small)), done.stderr
    dense = bp_convert.to_dense(small)
    assert type(dense.transformer.h[1].attn.c_attn) is transformers.pytorch_utils.Conv1D
    assert tokens(dense) == tokens(small)


@pytest.mark.slow
def test_a_target_on_data_is_met() -> None:
    model = gpt2()
    data = torch.randint(3, 90, (64, 8), generator=torch.Generator().manual_seed(1))
    small, _ = bp_convert.convert(
        model, inputs=IDS, target="params=0.6", calibrate={"input_ids": data}, convert_anyway=True
    )
    held = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in small.parameters()) <= 0.6 * held
    assert any(isinstance(module, BPConv1D) for module in small.modules())


def test_the_layers_inside_a_block_are_widened() -> None:
    plan = bp_convert.plan(gpt2(), inputs=IDS, alpha=2)
    after = {
        one.name.removeprefix("transformer.h.0."): one.after
        for one in plan.layers
        if one.name.startswith("transformer.h.0.")
    }
    assert after == {
        "attn.c_attn": (48, 288),
        "attn.c_proj": (96, 48),
        "mlp.c_fc": (48, 384),
        "mlp.c_proj": (384, 48),
    }


def test_sizes_that_contradict_the_weight_are_refused() -> None:
    model = gpt2()
    model.transformer.h[0].mlp.c_fc.nx = 40
    plan = bp_convert.plan(model, inputs=IDS, rank=2, convert_anyway=True)
    (layer,) = [one for one in plan.layers if one.name == "transformer.h.0.mlp.c_fc"]
    assert layer.action == "kept"
    assert "its weight is 48 x 192 while its attributes say 40 x 192" in (layer.reason or "")
