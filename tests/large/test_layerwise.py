"""Folders converted from disk to disk with one layer in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import bp_convert
from bp_convert.batch.attempt import run_job
from bp_convert.batch.folders import Results
from bp_convert.batch.identity import Task
from bp_convert.errors import CheckpointError, PlanError
from bp_convert.large import layerwise
from bp_convert.large.shards import Checkpoint, Shard
from bp_convert.run import job as running
from bp_convert.run import streamed
from bp_convert.run.job import Result, run
from bp_convert.run.written import Outputs
from bp_convert.values.progress import unheard
from bp_convert.values.recipe import Job
from bp_convert.values.settings import Settings

transformers = pytest.importorskip("transformers")
FILES = 15_000  # bytes of a file, so that there are several


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a sharded folder whose tensors are of two types, two of them tied."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0, torch_dtype="bfloat16",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("models") / "gpt2"
    model.save_pretrained(folder, max_shard_size="30KB")
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def _several_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layerwise, "SHARD", FILES)


def _job(source: Path, **more: Any) -> Job:
    settings = Settings(rank=0.25, convert_anyway=True)
    return Job(name="big", model=str(source), settings=settings, **{"layerwise": True, **more})


def _bytes(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.iterdir()}


def test_it_is_what_conversion_in_memory_gives(source: Path, tmp_path: Path) -> None:
    done = run(_job(source), Outputs(model=tmp_path / "small"))
    assert len([*(tmp_path / "small").glob("model-*.safetensors")]) > 2
    assert (tmp_path / "small" / "tokenizer_config.json").is_file()
    loaded = bp_convert.load(tmp_path / "small")
    model = transformers.GPT2LMHeadModel.from_pretrained(source)
    made = bp_convert.apply(model, bp_convert.plan_of(tmp_path / "small"))
    assert {one.dtype for one in loaded.parameters()} == {torch.bfloat16}
    for (name, one), (_, other) in zip(
        loaded.state_dict().items(), made.state_dict().items(), strict=True
    ):
        assert torch.equal(one, other), name
    assert done.report is not None
    assert done.report.fit_errors.keys() == {one.name for one in done.report.plan.converted}
    assert streamed.WHOLE in done.report.notes
    assert [one.name for one in tmp_path.iterdir()] == ["small"]  # and nothing hidden


@pytest.mark.parametrize("after", [1, 4, 8])
def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(
    source: Path, tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(_job(source), Outputs(model=tmp_path / "whole"))
    goal, fill, filled = tmp_path / "small", layerwise.fill, [0]

    def counting(*arguments: Any) -> float:
        filled[0] += 1
        if filled[0] == after:
            raise KeyboardInterrupt
        return fill(*arguments)

    monkeypatch.setattr(layerwise, "fill", counting)
    with pytest.raises(KeyboardInterrupt):
        run(_job(source), Outputs(model=goal))
    assert not goal.exists()
    done = run(_job(source), Outputs(model=goal))
    assert after <= filled[0] <= 9 + after  # nine layers, of which whole files are not done again
    assert after < 8 or filled[0] < 9 + after
    assert _bytes(goal) == _bytes(tmp_path / "whole")
    assert done.report is not None
    assert len(done.report.fit_errors) == len(done.report.plan.converted)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["small", "whole"]


def test_another_job_does_not_go_on_with_what_one_has_left(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layerwise._Run, "_beside", lambda _: pytest.exit("killed"))
    with pytest.raises(pytest.exit.Exception):
        run(_job(source), Outputs(model=tmp_path / "small"))
    monkeypatch.undo()
    half = Settings(rank=0.5, convert_anyway=True)
    job = _job(source).model_copy(update={"settings": half})
    done = run(job, Outputs(model=tmp_path / "small"))
    assert done.plan is not None
    held = sum(one.stop - one.start for one in Checkpoint(tmp_path / "small").entries.values())
    assert held == done.plan.bytes.after


def test_jobs_of_recipes_go_this_way_too(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streamed, "free_memory", lambda: 0)
    job = _job(source, layerwise=None, weights="folder", report=("json",))
    results = Results(tmp_path)
    outcome, new = run_job(Task(job, "one", "two"), results, unheard)
    assert outcome.state == "done", outcome.problem
    assert new
    assert bp_convert.load(results.home("big") / "model").config.n_layer == 2
    assert streamed.WHOLE in (results.home("big") / "report.json").read_text()


def test_large_models_go_this_way_by_themselves(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = Checkpoint(source).bytes
    job, plain = _job(source, layerwise=None), tmp_path / "small.pt"
    calibrated = _job(source, layerwise=None, calibrate="texts.txt")
    for free, by_layer in ((3 * size, True), (5 * size, False)):
        monkeypatch.setattr(streamed, "free_memory", lambda free=free: free)
        assert streamed.by_layer(job, None) is by_layer
        assert streamed.default_output(job) == Path("gpt2-bp" if by_layer else "gpt2-bp.pt")
        assert streamed.by_layer(job, tmp_path / "small") is by_layer
        assert not streamed.by_layer(job, plain)
        assert not streamed.by_layer(calibrated, None)
    monkeypatch.setattr(running, "opened", lambda _: pytest.fail("loaded"))
    planned: Result = run(_job(source), dry=True)
    assert planned.plan is not None
    assert planned.plan.macs is not None


@pytest.mark.parametrize(
    ("more", "goal", "words"),
    [
        ({"settings": Settings(target=("params=0.5",))}, "small", "--target, layer by layer"),
        ({"calibrate": "texts.txt"}, "small", "--calibrate, layer by layer"),
        ({"dtype": "float32"}, "small", "--dtype, layer by layer"),
        ({}, "small.pt", "one file for a model"),
        ({"model": "absent"}, "small", "no folder of a transformers model"),
    ],
)
def test_what_takes_the_whole_model_is_refused_with_a_way_out(
    source: Path, tmp_path: Path, more: dict[str, Any], goal: str, words: str
) -> None:
    job = Job(**{**_job(source).model_dump(exclude_unset=True), **more})
    with pytest.raises((PlanError, CheckpointError), match=words) as told:
        run(job, Outputs(model=tmp_path / goal))
    assert "--in-memory" in told.value.fix or "-o" in told.value.fix


def _renamed(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    file = next(iter(found["weight_map"].values()))
    form = {"another.weight": torch.empty(3, device="meta")}
    (folder / file).unlink()
    with Shard(folder / file, form) as shard:
        shard.put("another.weight", torch.zeros(3))


def _reshaped(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 51}))


def _quantised(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes().replace(b'"BF16"', b'"I128"', 1))


def _cut(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])


@pytest.mark.parametrize("damage", [_renamed, _reshaped, _quantised, _cut])
def test_weights_that_are_not_the_models_are_refused(
    source: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = tmp_path / "damaged"
    folder.mkdir()
    for one in source.iterdir():
        (folder / one.name).write_bytes(one.read_bytes())
    damage(folder)
    with pytest.raises(CheckpointError, match=r"missing|in the model|damaged"):
        run(_job(folder), Outputs(model=tmp_path / "small"))
    assert not (tmp_path / "small").exists()


def test_a_shard_is_what_the_library_reads(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    given = {
        "bytes": torch.arange(3, dtype=torch.uint8),
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "one": torch.tensor(2.5),
        "none": torch.empty(0, 4),
        "wide": torch.randn(4, 4, dtype=torch.float64).T,
    }
    with Shard(tmp_path / "a.safetensors", given) as shard:
        for name in reversed(given):
            shard.put(name, given[name])
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes())
    checkpoint = Checkpoint(tmp_path)
    with Shard(tmp_path / "b.safetensors", given) as shard:
        for name, stored in checkpoint.entries.items():
            shard.copy(name, stored)
    for file in ("a.safetensors", "b.safetensors"):
        read = load_file(tmp_path / file)
        assert {name: one.dtype for name, one in read.items()} == {
            name: one.dtype for name, one in given.items()
        }
        assert all(torch.equal(read[name], one) for name, one in given.items())
