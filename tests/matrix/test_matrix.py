"""Thirty architectures of the matrix, each in one mode, saved and read again elsewhere.

All of them: ``python benchmarks/matrix.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.zoo.registry import zoo
from benchmarks.zoo.trial import Record, Trial

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[2]
FULL = [
    "torchvision/resnet-basic",
    "torchvision/squeezenet1_1",
    "torchvision/swin",
    "own/detector-list",
    "timm/convnext_atto",
    "timm/vit_tiny_patch16_224",
    "timm/lcnet_035",
    "transformers/bert",
    "transformers/gpt2",
    "transformers/t5-encoder",
    "transformers/mamba",
    "transformers/vit",
    "own/tagger-bilstm",
    "own/tagger-packed",
    "own/packed-sequence-in",
    "own/encoder-padded",
    "own/experts",
    "own/layer-drop",
    "own/hook-closure-ran",
    "own/grid-cached",
    "own/flat-buffer",
    "own/dataclasses",
    "own/keyword-with-number",
    "own/dictionary-in",
    "own/noise-in-eval",
    "own/half",
]
MODES = {
    **dict.fromkeys(FULL, "full"),
    "own/captioner": "share",
    "own/regressor": "target",
    "transformers/distilbert": "alpha",
    "own/volume": "alpha",
}
READ = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from benchmarks.zoo.registry import zoo
from benchmarks.zoo.trial import reload
records = json.loads(sys.stdin.read())
found = [reload(zoo()[one["name"]], one, Path(folder)) for folder, one in records.items()]
print(json.dumps({one["name"]: [one["outcome"], one.get("text", "")] for one in found}))
"""
Results = dict[str, tuple[Path, Record]]


@pytest.fixture(scope="module")
def results() -> Results:
    """Gather what the tests of this module leave."""
    return {}


@pytest.mark.parametrize("name", MODES)
def test_converts_to_the_same_function(
    name: str, results: Results, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("trial")
    record = Trial(zoo()[name], MODES[name], folder).run()
    results[name] = (folder, record)
    assert record["outcome"] == "converted", record.get("text")
    assert record["file"]


def test_all_are_read_again_in_another_process(results: Results) -> None:
    written = {str(folder): one for folder, one in results.values() if "file" in one}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ],
        input=json.dumps(written),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {one["name"] for one in written.values()}
    assert {name: text for name, (outcome, text) in found.items() if outcome != "converted"} == {}


# The harness itself finds what is wrong


def _broken(change: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return bp_convert.convert with a fault put in."""
    import bp_convert

    honest = bp_convert.convert

    def convert(model: Any, **asked: Any) -> Any:
        small, report = honest(model, **asked)
        change(model, small)
        return small, report

    return convert


def _scaled(model: Any, small: Any) -> None:
    small[0].register_forward_hook(lambda m, i, o: o * 1.01)


def _other_weights(model: Any, small: Any) -> None:
    small[0].w1.data *= 1.01


def _source_written(model: Any, small: Any) -> None:
    model[2].bias.data[0] += 1e-7


def _source_hooked(model: Any, small: Any) -> None:
    model[0].register_forward_pre_hook(lambda m, i: None)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (_scaled, "differs from"),
        (_other_weights, "differs from source"),
        (_source_written, "the source is not what it was"),
        (_source_hooked, "the source is not what it was"),
    ],
)
def test_faults_are_found(
    fault: Callable[[Any, Any], None],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("bp_convert.convert", _broken(fault), raising=False)
    record = Trial(zoo()["own/flat-buffer"], "full", tmp_path).run()
    assert record["outcome"] in ("wrong", "not reloadable")
    assert words in record["text"]


def test_errors_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: Any, **__: Any) -> None:
        raise KeyError("size")

    monkeypatch.setattr("bp_convert.convert", crash, raising=False)
    record = Trial(zoo()["own/flat-buffer"], "share", tmp_path).run()
    assert (record["outcome"], record["error"], record["stage"]) == (
        "failed",
        "KeyError",
        "convert",
    )
    monkeypatch.undo()
    record = Trial(zoo()["own/keyword-only"], "target", tmp_path).run()
    assert record["outcome"] in ("converted", "refused")
