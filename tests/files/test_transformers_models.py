"""Models of transformers, converted and saved whole, load equal in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import bp_convert
from bp_convert.files.writable import check_writable

transformers = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
IDS = ("input_ids=int64:1x8<30", torch.arange(8).view(1, 8))


def bert() -> Any:
    config = transformers.BertConfig(**SMALL, vocab_size=30)
    return transformers.BertForSequenceClassification(config), IDS


def mamba() -> Any:
    """Its hooks are bound methods of its own."""
    config = transformers.MambaConfig(
        vocab_size=30, hidden_size=32, num_hidden_layers=2, state_size=8
    )
    return transformers.MambaModel(config), IDS


def segformer() -> Any:
    """Asks for its hidden states, which needs hooks, and a note outside of the model."""
    config = transformers.SegformerConfig(
        hidden_sizes=[16, 16, 32, 32], depths=[1] * 4, num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
    )  # fmt: skip
    picture = torch.linspace(-1, 1, 3 * 64 * 64).view(1, 3, 64, 64)
    return transformers.SegformerForSemanticSegmentation(config), (
        "pixel_values=float32:1x3x64x64", picture,
    )  # fmt: skip


def wav2vec2() -> Any:
    """Has a parametrized weight norm, which torch refuses to pickle."""
    config = transformers.Wav2Vec2Config(
        **SMALL, vocab_size=32, conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3),
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    sound = torch.linspace(-1, 1, 800).view(1, 800)
    return transformers.Wav2Vec2ForCTC(config), ("input_values=float32:1x800", sound)


MODELS = {one.__name__: one for one in (bert, mamba, segformer, wav2vec2)}
CODE = """
import json, sys, torch, bp_convert
torch.set_num_threads(1)
for name, key in json.loads(sys.argv[1]).items():
    model = bp_convert.load(f"{name}.pt", trust=["transformers"])
    given = torch.load(f"{name}-in.pt")
    with torch.no_grad():
        torch.save(model(**{key: given})[0], f"{name}-out.pt")
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("transformers")
    expected, keys = {}, {}
    for name, make in MODELS.items():
        torch.manual_seed(0)
        source, (spec, given) = make()
        assert check_writable(source, "x.pt") == ("transformers",)
        model, _ = bp_convert.convert(
            source.eval(), inputs=[spec], rank=0.25, convert_anyway=True, seed=1
        )
        bp_convert.save(model, folder / f"{name}.pt")
        torch.save(given, folder / f"{name}-in.pt")
        keys[name] = spec.partition("=")[0]
        with torch.no_grad():
            expected[name] = model(**{keys[name]: given})[0]
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(keys)], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {name: (one, torch.load(folder / f"{name}-out.pt")) for name, one in expected.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_same_outputs(name: str, elsewhere: dict[str, Any]) -> None:
    expected, found = elsewhere[name]
    torch.testing.assert_close(found, expected)


def test_the_source_s_own_pickle_is_read(tmp_path: Path) -> None:
    """Of a model whose hooks are bound methods, too."""
    source, (_, given) = mamba()
    torch.save(source.eval(), tmp_path / "mamba.pt")
    again = bp_convert.open_model(tmp_path / "mamba.pt", trust=["transformers"]).model
    with torch.no_grad():
        torch.testing.assert_close(again(given)[0], source(given)[0])
