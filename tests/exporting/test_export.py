"""Models are written for other runtimes, run there, and compared; what cannot be says why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import bp_convert
from bp_convert import BPLSTM, BPConv2d, BPEmbedding, BPLinear, ExportError, VerificationError
from bp_convert.cli.app import app
from bp_convert.exporting import runtime as runtimes
from bp_convert.exporting.executorch_file import ExecutorchRuntime
from bp_convert.exporting.torch_file import TorchRuntime


class Tagger(nn.Module):
    """Token ids (N, T) to scores (N, T, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = BPEmbedding(50, 16, rank=2)
        self.lstm = BPLSTM(16, 24, num_layers=2, bidirectional=True, batch_first=True, rank=2)
        self.head = BPLinear(48, 5, rank=3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(ids))[0])


def picture_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        BPConv2d(2, 8, 3, padding=1, rank=2), nn.ReLU(), nn.Flatten(), BPLinear(8 * 36, 240, rank=4)
    ).eval()


def needs(*modules: str) -> None:
    for one in modules:
        pytest.importorskip(one, reason=f"{one} is not installed")


def test_a_torch_program(tmp_path: Path) -> None:
    model, file = picture_net(), tmp_path / "net.pt2"
    done = bp_convert.export(
        model, file, to="torch-export", inputs="2x6x6", form="factors", batches=(1, 3)
    )
    assert done.difference is not None
    assert done.difference < 1e-5
    assert done.free == ("batch",)
    assert [one.form for one in done.layers] == ["factors", "factors"]
    assert [one.batch for one in done.latency] == [1, 3]
    assert done.dense_size is not None
    assert done.size < done.dense_size
    x = torch.randn(5, 2, 6, 6)
    torch.testing.assert_close(torch.export.load(file).module()(x), model(x))
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.filterwarnings("ignore")  # of the exporter's own libraries
def test_an_onnx_file_of_any_batch_and_length(tmp_path: Path) -> None:
    needs("onnx", "onnxscript", "onnxruntime")
    import onnxruntime

    torch.manual_seed(0)
    model, file = Tagger().eval(), tmp_path / "tagger.onnx"
    done = bp_convert.export(model, file, inputs="int64:1x8<50", batches=(1, 3))
    assert done.free == ("batch", "sequence")
    assert done.checked == ("batch 1", "batch 3 at another length")
    assert done.runtime.startswith("onnxruntime ")
    assert {one.name: one.form for one in done.layers}["lstm"] == "built"
    assert done.layers[0].micros.keys() == {"factors", "built"}
    assert done.dense_size is not None
    assert done.size < done.dense_size
    session = onnxruntime.InferenceSession(file)
    ids = torch.randint(50, (4, 13))
    got = session.run(None, {"ids": ids.numpy()})[0]
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(got), model(ids), atol=1e-5, rtol=1e-5)
    assert done.verdict in " ".join(str(done).split())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_of_torch_are_free_too(kind: type[nn.Module], tmp_path: Path) -> None:
    needs("onnx", "onnxscript", "onnxruntime")

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            more: Any = {"nonlinearity": "relu"} if kind is nn.RNN else {}
            self.rnn: Any = kind(6, 4, 2, bidirectional=kind is nn.GRU, **more)

        def forward(self, x: Tensor) -> Any:
            return self.rnn(x.transpose(0, 1))

    done = bp_convert.export(Last(), tmp_path / "last.onnx", inputs="5x6", batches=(1, 2))
    assert done.free == ("batch", "sequence")
    assert done.difference is not None
    assert done.difference < 1e-5
    assert done.latency == ()


@pytest.mark.filterwarnings("ignore")
def test_openvino_s_two_files(tmp_path: Path) -> None:
    needs("openvino", "onnx", "onnxscript")
    done = bp_convert.export(
        picture_net(), tmp_path / "net.xml", to="openvino", inputs="2x6x6", form="built"
    )
    assert sorted(one.name for one in tmp_path.iterdir()) == ["net.bin", "net.xml"]
    assert done.difference is not None
    assert done.difference < 1e-4
    assert done.dense_size is not None
    assert done.size < done.dense_size


@pytest.mark.filterwarnings("ignore")
def test_an_executorch_program(tmp_path: Path) -> None:
    needs("executorch.exir", "executorch.runtime")
    done = bp_convert.export(
        picture_net(),
        tmp_path / "net.pte",
        to="executorch",
        inputs="2x6x6",
        form="factors",
        batches=(1, 2),
    )
    assert done.difference is not None
    assert done.difference < 1e-4


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 4))
    small, _ = bp_convert.convert(source, rank=0.5, inputs=["64"], convert_anyway=True)
    bp_convert.save(small, "small.pt", check=False)
    torch.save(source, "source.pt")
    words = ["export", "small.pt", "--to", "torch-export", "-o", "small.pt2"]
    words += ["--against", "source.pt", "--report", "small.md", "--report", "small.json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "wrote small.pt2" in done.output
    assert "the dense model that was given" in " ".join(done.output.split())
    assert "exported to torch-export" in Path("small.md").read_text()
    read = bp_convert.Export.model_validate_json(Path("small.json").read_text())
    assert read.dense == "given"
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 1
    assert "an existing file" in again.stderr
    other = CliRunner().invoke(app, [*words[:5], "small.onnx"])
    assert other.exit_code == 1
    assert "name it small.pt2" in other.stderr


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ExportError) as caught:
        bp_convert.export(picture_net(), tmp_path / "net.onnx", inputs="2x6x6")
    assert "onnxscript" in caught.value.found
    assert caught.value.fix == "pip install 'bp-convert[onnx]'"


def test_without_its_runtime_a_file_is_written_and_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(TorchRuntime, "runs_with", ("no_such_runtime",))
    done = bp_convert.export(picture_net(), tmp_path / "net.pt2", to="torch-export", inputs="2x6x6")
    assert done.difference is None
    assert any("not installed" in one for one in done.notes)
    assert "not run" in done.verdict


def test_other_outputs_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened = TorchRuntime.opened

    def wrong(self: TorchRuntime, file: Path, threads: int) -> Any:
        run = opened(self, file, threads)
        return lambda inputs: [one + 1e-2 for one in run(inputs)]

    monkeypatch.setattr(TorchRuntime, "opened", wrong)
    with pytest.raises(VerificationError, match="nothing was written"):
        bp_convert.export(
            picture_net(), tmp_path / "net.pt2", to="torch-export", inputs="2x6x6", form="factors"
        )
    assert [*tmp_path.iterdir()] == []


class Positions(nn.Module):
    """Token ids (N, T), T up to 20, to vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(30, 4), nn.Embedding(20, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids) + self.places.weight[: ids.shape[1]]


def test_a_length_that_the_model_limits_is_free_up_to_there(tmp_path: Path) -> None:
    file = tmp_path / "net.pt2"
    done = bp_convert.export(Positions(), file, to="torch-export", inputs="int64:1x8")
    assert done.free == ("batch", "sequence up to 20")
    module = torch.export.load(file).module()
    assert module(torch.zeros(3, 20, dtype=torch.int64)).shape == (3, 20, 4)


class LooksAtData(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


def test_a_layer_that_cannot_be_traced_is_named(tmp_path: Path) -> None:
    model = nn.Sequential(BPLinear(6, 6), LooksAtData())
    with pytest.raises(ExportError) as caught:
        bp_convert.export(model, tmp_path / "net.pt2", to="torch-export", inputs="6")
    assert caught.value.where == "1 (LooksAtData)"
    assert "looks at the data" in caught.value.found


class FixesBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(int(x.shape[0]) // 1, -1) if x.shape[0] == 2 else x.flatten(1)


def test_a_batch_that_is_fixed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="fixes an axis"):
        bp_convert.export(
            FixesBatch(), tmp_path / "net.pt2", to="torch-export", inputs="2x3", sequences=False
        )


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvalsh(x @ x.transpose(1, 2))


@pytest.mark.filterwarnings("ignore")
def test_an_operator_that_onnx_lacks_is_named(tmp_path: Path) -> None:
    needs("onnx", "onnxscript")
    model = nn.Sequential(nn.Identity(), Odd())
    with pytest.raises(ExportError) as caught:
        bp_convert.export(model, tmp_path / "net.onnx", inputs="4x4")
    assert "eigh" in caught.value.found
    assert caught.value.where == "1 (Odd)"


def test_a_form_that_the_target_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="--form built"):
        bp_convert.export(
            picture_net(), tmp_path / "n.pt2", to="torch-export", inputs="2x6x6", form="built"
        )
    assert ExecutorchRuntime.forms == ("factors", "dense")
    assert not runtimes._there("no_such_module")
