"""Arrays that lie: nothing runs, and every error is one of ours."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import pytest

from bp_convert.errors import DataError
from bp_convert.values.tensors import TensorSpec
from tests.data.crafted import load_examples

SPEC = TensorSpec.parse("4")


def npy(header: str, data: bytes = bytes(64), version: tuple[int, int] = (1, 0)) -> bytes:
    said = header.encode("latin1")
    said += b" " * (64 - (11 + len(said)) % 64) + b"\n"
    return b"\x93NUMPY" + bytes(version) + struct.pack("<H", len(said) & 0xFFFF) + said + data


def array(kind: str, shape: str, order: str = "False", data: bytes = bytes(64)) -> bytes:
    return npy(f"{{'descr': '{kind}', 'fortran_order': {order}, 'shape': {shape}, }}", data)


HONEST = array("<f4", "(4, 4)")
PICKLE = b"\x80\x03cposix\nsystem\nX\x0c\x00\x00\x00touch MARKER\x85R."
LIES = {
    "short": array("<f4", "(400, 4)"),
    "huge": array("<f4", "(4000000000000, 4)"),
    "beyond": array("<f4", f"({2**63}, 4)"),
    "negative": array("<f4", "(-4, -4)"),
    "words": array("<U1", "(4, 4)"),
    "bytes": array("|V4", "(4, 4)"),
    "complex": array("<c8", "(2, 4)"),
    "times": array("<M8[s]", "(2, 4)"),
    "objects": array("|O", "(4, 4)", data=PICKLE),
    "fields": npy("{'descr': [('a','<f4'),('b','O')], 'fortran_order': False, 'shape': (2,)}"),
    "code": npy("__import__('os').system('touch MARKER')"),
    "deep": npy("(" * 30_000),
    "no rows": array("<f4", "(0, 4)", data=b""),
    "one number": array("<f4", "()"),
    "order": array("<f4", "(4, 4)", order="3"),
    "axes": array("<f4", f"({','.join(['1'] * 70)})"),
    "version": npy("{}", version=(9, 9)),
    "cut off": HONEST[:20],
    "a pickle": PICKLE,
    "empty": b"",
}


@pytest.mark.parametrize("lie", LIES)
def test_arrays(lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = LIES[lie]
    Path("x.npy").write_bytes(content)
    with zipfile.ZipFile("x.npz", "w") as archive:
        archive.writestr("x.npy", content)
    with zipfile.ZipFile("y.npz", "w") as archive:
        archive.writestr("x.npy", HONEST)
        archive.writestr("y.npy", content)
    for name in ("x.npy", "x.npz", "y.npz"):
        with pytest.raises(DataError) as caught:
            load_examples(name, [SPEC])
        assert caught.value.fix
    assert not Path("MARKER").exists()


@pytest.mark.parametrize("end", [0, 1, 10, 30, 60, -1, -22, -40])
def test_archives_that_are_cut_off(end: int, tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", HONEST)
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(DataError):
        load_examples(path, [SPEC])


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_arrays_of_one_name(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", HONEST)
        archive.writestr("x.npy", LIES["objects"])
    with pytest.raises(DataError):
        load_examples(path, [SPEC])
    assert not (tmp_path / "MARKER").exists()


@pytest.mark.parametrize(
    "header",
    [
        b'{"x":{"dtype":"F32","shape":[5,4],"data_offsets":[0,64]}}',
        b'{"x":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,64]}}',
        b'{"x":{"dtype":"F32","shape":[-4,-4],"data_offsets":[0,64]}}',
        b'{"x":{"dtype":"F32","shape":[4,4],"data_offsets":[64,0]}}',
        b'{"x":NaN}',
        b"[]",
    ],
)
def test_safetensors(header: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    with pytest.raises(DataError):
        load_examples(path, [SPEC])
