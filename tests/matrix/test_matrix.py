"""Thirty architectures of the matrix, each in one mode, saved and read again in another process.

All of them: ``python benchmarks/matrix.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.zoo.registry import zoo
from benchmarks.zoo.trial import Record, Trial

pytestmark = pytest.mark.filterwarnings("ignore")
ROOT = Path(__file__).parents[2]
FULL = [
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
QUICK = (  # run by `make test`, too
    "torchvision/resnet-basic",
    "own/tagger-packed",
    "own/experts",
    "own/hook-closure-ran",
    "own/dataclasses",
    "own/half",
    "own/regressor",
)
RUNS = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow, id=name) for name in MODES
]
READ = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from benchmarks.zoo.registry import zoo
from benchmarks.zoo.trial import reload
told, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    folder, record = json.loads(line)
    found = reload(zoo()[record["name"]], record, Path(folder))
    print(json.dumps([found["outcome"], found.get("text", "")]), file=told, flush=True)
"""
Reader = Callable[[Path, Record], list[str]]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Start another process, which reads what it is shown and tells what came of it."""
    log = tmp_path_factory.mktemp("reader") / "log.txt"
    with log.open("w") as opened:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", READ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=opened,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )

    def read(folder: Path, record: Record) -> list[str]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([str(folder), record]) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, log.read_text()[-2000:]
        found: list[str] = json.loads(answer)
        return found

    yield read
    process.communicate()


@pytest.mark.parametrize("name", RUNS)
def test_converts_to_the_same_function_here_and_elsewhere(
    name: str, elsewhere: Reader, tmp_path: Path
) -> None:
    record = Trial(zoo()[name], MODES[name], tmp_path).run()
    assert record["outcome"] == "converted", record.get("text")
    assert record["file"]
    outcome, text = elsewhere(tmp_path, record)
    assert outcome == "converted", text


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
