"""Tied tables in models of transformers: folders, ``tie_weights`` and ``generate``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import bp_convert

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
TOKENS = torch.randint(2, 60, (16, 8), generator=torch.Generator().manual_seed(1))


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=60, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    """Its table has a padding row, and its head's bias stands beside it."""
    config = transformers.BertConfig(**SMALL, vocab_size=60, max_position_embeddings=16)
    return transformers.BertForMaskedLM(config)


def t5() -> Any:
    """Three tables and a head are one."""
    config = transformers.T5Config(
        vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _ties(model: Any) -> set[str]:
    once = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - once


@pytest.mark.parametrize("make", [gpt2, bert, t5], ids=lambda one: str(one.__name__))
def test_the_tie_is_kept(make: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = make().eval()
    given = {"input_ids": TOKENS}
    if make is t5:
        given["decoder_input_ids"] = TOKENS
    small: Any
    small, report = bp_convert.convert(source, target="params=0.4", calibrate=given)
    first = {name: one[:2] for name, one in given.items()}
    wanted = small(**first).logits
    factors = {name for name in _ties(small) if name.endswith(("w1", "w2"))}
    tables = {name for name in factors if "embed" in name or "head" in name or "decoder.w" in name}
    assert len(tables) == (6 if make is t5 else 2)
    assert sum(one.numel() for one in small.parameters()) == report.plan.params.after
    small.tie_weights()
    assert _ties(small) == _ties(copy.deepcopy(small)) >= factors

    bp_convert.save(small, f"{tmp_path}/folder/")
    again: Any = bp_convert.load(tmp_path / "folder")
    assert _ties(again) == _ties(small)
    torch.testing.assert_close(again(**first).logits, wanted)

    dense: Any = bp_convert.to_dense(small)
    assert _ties(dense) == _ties(source)
    assert dense.all_tied_weights_keys == source.all_tied_weights_keys
    dense.save_pretrained(tmp_path / "dense")
    plain = type(source).from_pretrained(tmp_path / "dense")
    torch.testing.assert_close(plain(**first).logits, wanted)
    if make is gpt2:
        asked = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        here, there = (one.generate(TOKENS[:1], **asked) for one in (again, dense))
        assert torch.equal(here, there)
