"""Each file that is no model says what it is and what to do."""

from __future__ import annotations

import gzip
import os
import pickle
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from bp_convert.errors import CheckpointError
from bp_convert.files.read_model import load_model
from bp_convert.files.sniff import FileKind, file_kind


def _truncated(path: Path) -> None:
    torch.save(nn.Linear(8, 8), path)
    path.write_bytes(path.read_bytes()[:-100])


def _truncated_safetensors(path: Path) -> None:
    save_file({"w": torch.zeros(8)}, path)
    path.write_bytes(path.read_bytes()[:20])


def _short_safetensors(path: Path) -> None:
    save_file({"w": torch.zeros(64)}, path)
    path.write_bytes(path.read_bytes()[:-100])


def _torchscript(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("data.pkl", "constants.pkl", "code/__torch__.py", "version"):
            archive.writestr(f"m/{name}", b"")


def _exported(path: Path) -> None:
    program = torch.export.export(nn.Linear(2, 2), (torch.zeros(1, 2),))
    torch.export.save(program, path)


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")


def _keras(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("metadata.json", "config.json", "model.weights.h5"):
            archive.writestr(name, b"{}")


def _tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.add(__file__, arcname="storages")


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
MAKERS: list[tuple[str, str, Callable[[Path], object], str, str]] = [
    ("empty", "m.pt", lambda p: p.write_bytes(b""), "an empty file", "again"),
    ("truncated", "m.pt", _truncated, "truncated or damaged", "again"),
    ("text", "m.pt", lambda p: p.write_text("weights, ünïcode\n" * 9000), "a text file", "model"),
    ("html", "m.pt", lambda p: p.write_text("<!DOCTYPE html><p>404"), "a web page", "download"),
    ("lfs", "m.pt", lambda p: p.write_bytes(LFS), "git-lfs pointer", "git lfs pull"),
    ("onnx", "m.onnx", lambda p: p.write_bytes(b"\x08\x07\x12\x07pytorch"), "ONNX", "PyTorch"),
    ("onnx renamed", "m.pt", lambda p: p.write_bytes(b"\x08\x07\x12\x07p\xff"), "ONNX", "PyTorch"),
    ("onnx graph", "m.pt", lambda p: p.write_bytes(b"\x08\x0a\x3a\x07p\xff"), "ONNX", "PyTorch"),
    ("gguf", "m.bin", lambda p: p.write_bytes(b"GGUF\x03\0\0\0"), "a GGUF", ".safetensors"),
    ("hdf5", "m.pt", lambda p: p.write_bytes(b"\x89HDF\r\n\x1a\n"), "HDF5", "PyTorch"),
    ("keras", "m.pt", _keras, "a Keras model", "PyTorch"),
    ("tflite", "m.pt", lambda p: p.write_bytes(b"\x1c\0\0\0TFL3\0"), "Lite", "PyTorch"),
    ("saved", "m.pt", lambda p: p.write_bytes(b"\x08\x01\x12\x90\xff"), "TensorFlow", "PyTorch"),
    (
        "graph",
        "m.pt",
        lambda p: p.write_bytes(b"\n\x10\n\x01x\x12\x0bPlaceholder\xff"),
        "TensorFlow",
        "PyTorch",
    ),
    ("npy", "m.npy", lambda p: np.save(p, np.zeros(3)), "a numpy array", "torch.save"),
    ("npz", "m.npz", lambda p: np.savez(p, w=np.zeros(3)), "numpy .npz", "torch.save"),
    (
        "pickle",
        "m.pkl",
        lambda p: p.write_bytes(pickle.dumps(1)),
        "plain pickle",
        "torch.save",
    ),
    (
        "sklearn",
        "m.joblib",
        lambda p: p.write_bytes(b"\x80\x04\x95\x00csklearn.svm\nSVC\n."),
        "scikit-learn",
        "PyTorch",
    ),
    ("torchscript", "m.pt", _torchscript, "TorchScript", "eager model"),
    ("exported", "m.pt2", _exported, "exported program", "eager model"),
    ("zip", "m.zip", _zip, "a zip archive", "unpack"),
    ("gzip", "m.pt.gz", lambda p: p.write_bytes(gzip.compress(b"x")), "gzip", "unpack"),
    ("tar", "m.tar", _tar, "a tar archive", "unpack"),
    ("hdf5", "m.h5", lambda p: p.write_bytes(b"\x89HDF\r\n\x1a\n"), "HDF5", "PyTorch"),
    ("gguf", "m.gguf", lambda p: p.write_bytes(b"GGUF\3\0\0\0"), "GGUF", "PyTorch"),
    ("bytes", "m.pt", lambda p: p.write_bytes(bytes(range(128, 256))), "no known kind", "again"),
    ("bad safetensors", "m.safetensors", _truncated_safetensors, "damaged safetensors", "again"),
    ("short safetensors", "m.safetensors", _short_safetensors, "damaged safetensors", "again"),
]


@pytest.mark.parametrize("arch", [None, "torchvision:resnet18"])
@pytest.mark.parametrize(
    ("name", "make", "found", "fix"), [one[1:] for one in MAKERS], ids=[one[0] for one in MAKERS]
)
def test_what_is_no_model(
    name: str,
    make: Callable[[Path], object],
    found: str,
    fix: str,
    arch: str | None,
    tmp_path: Path,
) -> None:
    path = tmp_path / name
    make(path)
    with pytest.raises(CheckpointError) as caught:
        load_model(path, arch=arch)
    assert found in caught.value.found
    assert fix in caught.value.fix
    assert str(path) in caught.value.where


def test_real_torchscript(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of torch call it deprecated
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path)
    with pytest.raises(CheckpointError, match="TorchScript"):
        file_kind(path)


def test_an_absent_file_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "resnet.pt").touch()
    with pytest.raises(CheckpointError, match=r"resnet\.pt"):
        load_model(tmp_path / "resnett.pt")
    with pytest.raises(CheckpointError, match="no folder"):
        load_model(tmp_path / "nowhere" / "resnet.pt")
    with pytest.raises(CheckpointError):
        load_model("bad\0name")


def test_folders_and_pipes(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="a folder"):
        load_model(tmp_path)
    (tmp_path / "weights.pt").touch()
    with pytest.raises(CheckpointError, match=r"weights\.pt"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"a folder without model\.safetensors"):
        load_model(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="a pipe"):
        load_model(tmp_path / "pipe")


def test_the_readable_kinds(tmp_path: Path) -> None:
    state = {"w": torch.zeros(3)}
    torch.save(state, tmp_path / "new.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file(state, tmp_path / "safe.bin")  # told by its bytes, not by its name
    assert file_kind(tmp_path / "new.pt") is FileKind.TORCH
    assert file_kind(tmp_path / "old.pt") is FileKind.LEGACY
    assert file_kind(tmp_path / "safe.bin") is FileKind.SAFETENSORS
