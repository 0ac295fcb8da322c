"""Folders of transformers, written from converted models and loaded again."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import bp_convert
from bp_convert import storage
from bp_convert.cli.app import app
from bp_convert.errors import CheckpointError
from bp_convert.layers import BPLinear

transformers = pytest.importorskip("transformers")
IDS = torch.arange(10).view(1, 10)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small GPT-2."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    transformers.GPT2LMHeadModel(config).eval().save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "modules.json").write_text('[{"path": ""}, {"path": "1_Pooling"}, {"path": "../x"}]')
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text("{}")
    (folder / "model.onnx").write_text("of the large model")
    return folder


@pytest.fixture(scope="module")
def small(source: Path) -> Path:
    """Return the folder that the command makes of it."""
    folder = source.parent / "gpt2-0.25"
    words = [str(source), "--rank", "0.25", "--convert-anyway", "-o", str(folder), "-q"]
    assert CliRunner().invoke(app, words).exit_code == 0
    return folder


def _model(source: Path) -> Any:
    model = transformers.GPT2LMHeadModel.from_pretrained(source)
    return bp_convert.convert(
        model, inputs=["input_ids=int64:1x8<50"], rank=0.25, convert_anyway=True
    )[0]


def _equal(one: Any, other: Any) -> bool:
    with torch.no_grad():
        return torch.equal(one(IDS).logits, other(IDS).logits)


def test_a_folder_holds_all_that_its_source_held_but_the_weights(small: Path) -> None:
    names = {str(one.relative_to(small)) for one in small.rglob("*") if one.is_file()}
    assert names == {
        *("config.json", "generation_config.json", "model.safetensors", "bp_convert_plan.json"),
        *("modeling_bp_convert.py", "tokenizer_config.json", "modules.json"),
        "1_Pooling/config.json",
    }
    plan = bp_convert.plan_of(small)
    assert len(plan.layers) > len(plan.converted) > 0  # and what stays, with its reason


def test_auto_classes_load_it_small_in_a_fresh_process(small: Path, source: Path) -> None:
    """And tokens are those of the model before it was saved, made with a cache."""
    before = bp_convert.from_pretrained(small)
    assert type(before) is transformers.GPT2LMHeadModel
    assert not before.training
    given: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    tokens = before.generate(IDS, use_cache=True, **given)
    assert torch.equal(tokens, before.generate(IDS, use_cache=False, **given))
    code = (
        "import json, torch, transformers\n"
        f"load, given = dict(trust_remote_code=True), {given}\n"
        f"small = transformers.AutoModelForCausalLM.from_pretrained({str(small)!r}, **load)\n"
        f"body = transformers.AutoModel.from_pretrained({str(small)!r}, **load)\n"
        f"large = transformers.AutoModelForCausalLM.from_pretrained({str(source)!r})\n"
        "ids = torch.arange(10).view(1, 10)\n"
        "state = body(ids).last_hidden_state - small.transformer(ids).last_hidden_state\n"
        "print(json.dumps([small.generate(ids, **given).tolist(), type(body).__name__,\n"
        "    float(state.abs().max()), small.num_parameters(), large.num_parameters()]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    again, body, apart, few, many = json.loads(done.stdout.splitlines()[-1])
    assert again == tokens.tolist()
    assert (body, apart) == ("GPT2Model", 0)
    assert few == before.num_parameters() < 0.7 * many


def test_every_way_out_of_a_model_writes_the_same_folder(source: Path, tmp_path: Path) -> None:
    model = _model(source)
    config = model.config.to_dict()
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    bp_convert.save(model, tmp_path / "whole.pt")
    loaded = bp_convert.load(tmp_path / "whole.pt", trust=["transformers"])
    for number, one in enumerate((model, copied, pickled, loaded)):
        with torch.no_grad():
            one.transformer.wpe.weight.add_(number)  # each writes its own weights
        one.save_pretrained(tmp_path / str(number), max_shard_size="40KB")
        assert len([*(tmp_path / str(number)).glob("*.safetensors")]) > 1
        assert _equal(bp_convert.load(tmp_path / str(number)), one)
    assert model.config.to_dict() == {**config, "architectures": ["GPT2LMHeadModel"]}
    with pytest.raises(CheckpointError, match="a part of it"):
        model.transformer.save_pretrained(tmp_path / "part")
    again = bp_convert.load(tmp_path / "0")
    again.save_pretrained(tmp_path / "again")
    assert _equal(bp_convert.load(tmp_path / "again"), again)
    assert bp_convert.plan_of(again) == bp_convert.plan_of(model)


def test_a_loaded_model_goes_back_to_plain_layers(small: Path, tmp_path: Path) -> None:
    storage.save_dense(bp_convert.to_dense(bp_convert.load(small)), tmp_path / "dense")
    dense = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert not any(isinstance(one, BPLinear) for one in dense.modules())
    model = bp_convert.from_pretrained(small)
    with torch.no_grad():
        torch.testing.assert_close(dense(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert not {"bp_convert", "auto_map"} & config.keys()


def test_loading_takes_the_options_of_transformers(small: Path) -> None:
    model = bp_convert.from_pretrained(small, dtype=torch.bfloat16, attn_implementation="eager")
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    config = transformers.AutoConfig.from_pretrained(small)
    fresh = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert fresh.num_parameters() == model.num_parameters()
    head = transformers.AutoModelForSequenceClassification.from_pretrained(
        small, trust_remote_code=True, num_labels=3, pad_token_id=0
    )
    assert head(IDS).logits.shape == (1, 3)
    assert head.transformer.h[0].mlp.c_fc.weight.equal(
        bp_convert.from_pretrained(small).transformer.h[0].mlp.c_fc.weight
    )


def test_what_a_folder_cannot_hold_is_refused_before_any_work(
    source: Path, small: Path, tmp_path: Path
) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 3))
    model, _ = bp_convert.convert(net, rank=2, convert_anyway=True)
    with pytest.raises(CheckpointError, match="not one of transformers"):
        bp_convert.save(model, f"{tmp_path / 'net'}/")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("mine")
    made = bp_convert.load(small)
    for path, words in ((tmp_path / "mine", "did not write"), (small, "an existing model")):
        with pytest.raises(CheckpointError, match=words):
            bp_convert.save(made, path)
    with pytest.raises(CheckpointError, match="did not write"):
        bp_convert.save(made, tmp_path / "mine", force=True)
    assert (tmp_path / "mine" / "letter.txt").read_text() == "mine"
    bp_convert.save(made, tmp_path / "new")
    bp_convert.save(made, tmp_path / "new", force=True)
    assert [one.name for one in tmp_path.iterdir() if one.name.startswith(".")] == []


@pytest.mark.parametrize("lost", ["a tensor", "a layer", "the plan", "the weights"])
def test_a_damaged_folder_says_what_is_wrong(small: Path, tmp_path: Path, lost: str) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "damaged"
    bp_convert.save(bp_convert.load(small), folder)
    config = json.loads((folder / "config.json").read_text())
    if lost == "a tensor":
        weights = load_file(folder / "model.safetensors")
        del weights[next(name for name in weights if name.endswith("w1"))]
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    elif lost == "a layer":
        config["bp_convert"]["plan"]["layers"][0]["name"] += "x"
    elif lost == "the plan":
        config["bp_convert"]["plan"]["layers"][0]["factors"] = 5
    else:
        (folder / "model.safetensors").write_bytes(b"nonsense")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"w1|not in it|factors|cannot load"):
        bp_convert.load(folder)


def test_a_folder_gives_its_type_and_the_result_keeps_it(tmp_path: Path) -> None:
    """What a model computes for itself, such as rotary frequencies, keeps its own."""
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "llama")
    opened: Any = bp_convert.open_model(tmp_path / "llama").model
    assert {one.dtype for one in opened.parameters()} == {torch.bfloat16}
    assert opened.model.rotary_emb.inv_freq.dtype == torch.float32
    small, _ = bp_convert.convert(
        opened, inputs=["input_ids=int64:1x8<50"], rank=0.25, convert_anyway=True
    )
    bp_convert.save(small, tmp_path / "small")
    loaded: Any = bp_convert.load(tmp_path / "small")
    assert {one.dtype for one in loaded.parameters()} == {torch.bfloat16}
    assert _equal(loaded, small.eval())


def test_a_trainers_checkpoints_load_small_and_go_on(small: Path, tmp_path: Path) -> None:
    class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {"input_ids": IDS[0] + index, "labels": IDS[0]}

    def trained(folder: Path, resumed: bool) -> Any:
        options = transformers.TrainingArguments(
            str(folder), max_steps=2, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True,
            per_device_train_batch_size=2,
        )  # fmt: skip
        model = bp_convert.from_pretrained(small)
        trainer = transformers.Trainer(model=model, args=options, train_dataset=Tokens())
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-1") if resumed else None)
        return model.eval()

    model = trained(tmp_path, False)
    assert _equal(bp_convert.load(tmp_path / "checkpoint-2"), model)
    assert not _equal(bp_convert.load(tmp_path / "checkpoint-1"), model)
    assert _equal(trained(tmp_path, True), model)


@pytest.mark.filterwarnings("ignore")  # peft warns of classes that it does not know
def test_adapters_of_peft_stay_beside_the_factors(small: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], r=2)
    config._register_custom_module(bp_convert.hub.lora_layers())
    model = peft.get_peft_model(bp_convert.load(small), config)
    model(input_ids=IDS, labels=IDS).loss.backward()
    grads = [one.grad for name, one in model.named_parameters() if "lora_" in name]
    assert grads
    assert all(one is not None for one in grads)
    with pytest.raises(CheckpointError, match="keep the adapter"):
        model.merge_and_unload()
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(bp_convert.load(small), tmp_path, config=config)
    assert torch.equal(again(input_ids=IDS).logits, model(input_ids=IDS).logits)
