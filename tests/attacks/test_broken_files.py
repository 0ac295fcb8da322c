"""Damaged and lying files: nothing runs, every error is one of ours, and nothing takes long."""

from __future__ import annotations

import contextlib
import io
import json
import random
import struct
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import bp_convert
from bp_convert.errors import BpConvertError, CheckpointError
from bp_convert.files.converted import is_converted, read_converted, save_converted
from bp_convert.files.read_model import load_model
from bp_convert.files.state import weights_alone
from bp_convert.files.unpickle import revive
from bp_convert.pickles.admit import admit
from bp_convert.pickles.harmless import HARMLESS, OF_TORCHVISION
from tests.attacks.crafted import small
from tests.files.crafted import call, text, torch_file, whole

ARCH = f"{Path(__file__).with_name('crafted.py')}:small"
FORMS = ("whole.pt", "state.pt", "pair.safetensors", "model.pt", "weights.pt", "old.pt")
READERS: tuple[Callable[[Path], object], ...] = (
    load_model,
    lambda path: load_model(path, arch=ARCH),
    read_converted,
    bp_convert.load,
    is_converted,
    weights_alone,
)


def write(folder: Path, form: str) -> Path:
    path, model = folder / form, small()
    about = {"model": model, "plan_json": "{}", "settings_json": "{}"}
    if form == "model.pt":
        torch.save(model, path)
    elif form in ("weights.pt", "old.pt"):
        new = form == "weights.pt"
        torch.save(model.state_dict(), path, _use_new_zipfile_serialization=new)
    else:
        save_converted(path, **about, arch="a:b" if form == "state.pt" else None)  # type: ignore[arg-type]
    return path


def read_all(path: Path) -> None:
    """Read a file in every way; let no error through that is not ours."""
    for read in READERS:
        start, caught = time.perf_counter(), None
        try:
            read(path)
        except BpConvertError as problem:
            caught = problem
        assert caught is None or all((caught.where, caught.found, caught.allowed, caught.fix))
        assert time.perf_counter() - start < 20


def boundaries(content: bytes) -> Iterator[int]:
    """Yield where to cut: the first bytes, each record of a zip, the end."""
    yield from (0, 1, 2, 4, 7, 8, 9, 16, 30, len(content) // 2, len(content) - 22, len(content) - 1)
    place = content.find(b"PK")
    while place >= 0:
        yield from (place, place + 2, place + 4, place + 10)
        place = content.find(b"PK", place + 1)


@pytest.mark.parametrize("form", FORMS)
def test_cut_off(form: str, tmp_path: Path) -> None:
    path = write(tmp_path, form)
    content = path.read_bytes()
    for end in sorted({*boundaries(content)}):
        path.write_bytes(content[:end])
        read_all(path)
        with pytest.raises(CheckpointError):
            bp_convert.load(path)


@pytest.mark.parametrize("form", FORMS)
def test_changed_bytes(form: str, tmp_path: Path) -> None:
    path = write(tmp_path, form)
    content, rng = path.read_bytes(), random.Random(form)
    for _ in range(25):
        changed = bytearray(content)
        for _ in range(rng.choice([1, 1, 2, 8])):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        path.write_bytes(bytes(changed))
        read_all(path)


@pytest.mark.parametrize("form", ["whole.pt", "state.pt", "model.pt", "weights.pt"])
def test_changed_pickles(form: str, tmp_path: Path) -> None:
    """The records of the archive are whole; what the pickle does is not."""
    path = write(tmp_path, form)
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    name = next(one for one in records if one.endswith("data.pkl"))
    rng = random.Random(form)
    for _ in range(60):
        changed = bytearray(records[name])
        for _ in range(rng.choice([1, 2, 3])):
            place, other = rng.randrange(2, len(changed)), rng.randrange(2, len(changed))
            match rng.randrange(4):
                case 0:
                    changed[place] = rng.randrange(256)
                case 1:
                    del changed[place : place + rng.randrange(1, 8)]
                case 2:
                    changed[place:place] = rng.choices(b"(}])RbtuseaqhKNJ0.", k=3)
                case 3:
                    changed[place : place + 20] = changed[other : other + 20]
        with zipfile.ZipFile(path, "w") as archive:
            for record, held in records.items():
                archive.writestr(record, bytes(changed) if record == name else held)
        read_all(path)


def archive(path: Path, *more: tuple[str, bytes], **changed: bytes) -> Path:
    """Write a torch.save archive with records changed or added."""
    buffer = io.BytesIO()
    torch.save({"w": torch.zeros(4)}, buffer)
    with zipfile.ZipFile(buffer) as honest, zipfile.ZipFile(path, "w", 8) as out:
        for name in honest.namelist():
            key = name.partition("/")[2].replace("/", "_").replace(".", "_")
            out.writestr(name, changed.get(key, honest.read(name)))
        for name, content in more:
            out.writestr(name, content)
    return path


def test_an_honest_archive_may_be_packed(tmp_path: Path) -> None:
    assert weights_alone(archive(tmp_path / "a.pt")) is not None


def test_bombs(tmp_path: Path) -> None:
    for changed in ({"data_pkl": b"N0" * 2**26 + b"."}, {"data_0": bytes(2**27)}):
        path = archive(tmp_path / "a.pt", **changed)
        assert path.stat().st_size < 2**20
        with pytest.raises(CheckpointError, match="unpacks to"):
            load_model(path)
        read_all(path)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_records_of_one_name(tmp_path: Path) -> None:
    """Two readers of zip files may see one each."""
    path = archive(tmp_path / "a.pt", ("archive/data.pkl", whole(call("os", "system", "true"))))
    with pytest.raises(CheckpointError, match="two records"):
        load_model(path)
    read_all(path)


@pytest.mark.parametrize("depth", [100, 3000])
def test_nesting(depth: int, tmp_path: Path) -> None:
    module = b"ctorch.nn.modules.container\nSequential\nq\x01"
    inner = b"h\x01)\x81}" + text("_parameters") + b"}s" + text("_modules") + b"}" + text("0")
    keys = (("format", b"K\x01"), ("plan", text("{}")), ("settings", text("{}")), ("arch", b"N"))
    head = b"}(" + b"".join(text(key) + value for key, value in keys)
    lists = b"]" * depth + b"a" * (depth - 1)
    for opcodes in (
        lists,
        b"}" + (text("a") + b"}") * (depth - 1) + b"s" * (depth - 1),
        b")" + b"\x85" * depth,
        module + inner * depth + b"N" + b"ssb" * depth,
        head + text("state") + b"}" + text("w") + lists + b"s" + text("skeleton") + b"Nu",
        head + text("state") + b"N" + text("skeleton") + module + inner * depth + b"N"
        + b"ssb" * depth + b"u",
    ):  # fmt: skip
        read_all(torch_file(tmp_path / "a.pt", whole(opcodes)))


@pytest.mark.parametrize(
    "state",
    [
        {1: torch.zeros(2)}, {(1, 2): torch.zeros(2)}, {"w": 3}, {"w": [torch.zeros(2)]}, [], 3,
        {"w": {"x": torch.zeros(2)}}, {None: None}, {"w": torch.zeros(2, device="meta")},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("key", ["state", "skeleton", "plan", "settings", "format", "arch"])
def test_other_types(key: str, state: object, tmp_path: Path) -> None:
    path = write(tmp_path, "state.pt")
    content = torch.load(path)
    torch.save({**content, key: state}, path)
    read_all(path)
    with pytest.raises(BpConvertError):
        bp_convert.load(path, model=small())


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


HUGE = b"\x8a\x08" + (10**18).to_bytes(8, "little")
ARGUMENTS = (
    b")", number(1) + b"\x85", number(-1) + b"\x85", text("x") + b"\x85", b"N\x85", HUGE + b"\x85",
    b"}\x85", b"]\x85", text("x") + text("y") + b"\x86", HUGE + HUGE + b"\x86", b"(NNNNNt",
    b"(}}}}}t", text("<f4") + b"\x85", text("O") + b"\x85",
    b"(ctorch.nn.modules.linear\nLinear\n)]}\x88t", b"(c__builtin__\nset\n)]}\x88t",
)  # fmt: skip
STATES = (
    b"", b"}b", b"N\x85b", text("x") + b"b", b"}" + text("a") + number(1) + b"sb", b"}}\x86b",
    b"NN}\x87b", b"}" + text("_modules") + number(1) + b"sb", b"}" + text("hook") + b"Nsb",
)  # fmt: skip
OWN = (
    "torch.nn.modules.linear.Linear",
    "torch.nn.modules.rnn.LSTM",
    "torch.nn.modules.container.ModuleDict",
    "torchvision.models.resnet.ResNet",
    "bp_convert.layers.linear.BPLinear",
    "bp_convert.layers.lstm.BPLSTM",
)


@pytest.mark.parametrize("name", [*HARMLESS, *OF_TORCHVISION, *OWN])
def test_admitted_names_on_odd_arguments(name: str, tmp_path: Path) -> None:
    """Each is called, and its result given a state, as no honest file would: it fails, or works."""
    home, _, attribute = name.rpartition(".")
    named = f"c{home}\n{attribute}\n".encode()
    known = {name: admit(name), OWN[0]: admit(OWN[0])}
    for arguments in ARGUMENTS:
        for state in STATES:
            start = time.perf_counter()
            with contextlib.suppress(Exception):
                revive(whole(named + arguments + b"R" + state), [], known, ())
            assert time.perf_counter() - start < 5, (arguments, state)
        torch_file(tmp_path / "a.pt", whole(named + arguments + b"R"))
        with pytest.raises(CheckpointError):
            load_model(tmp_path / "a.pt", arch=ARCH)


WEIGHT = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
LIES: dict[str, object] = {
    "shape": {"w": {**WEIGHT, "shape": [5, 4]}},
    "negative": {"w": {**WEIGHT, "shape": [-4, -4]}},
    "huge": {"w": {**WEIGHT, "shape": [2**62, 4]}},
    "overflow": {"w": {**WEIGHT, "shape": [2**63, 2]}},
    "fraction": {"w": {**WEIGHT, "shape": [4.0, 4]}},
    "beyond": {"w": {**WEIGHT, "data_offsets": [0, 6400]}},
    "backwards": {"w": {**WEIGHT, "data_offsets": [64, 0]}},
    "hole": {"w": {**WEIGHT, "shape": [2, 4], "data_offsets": [32, 64]}},
    "overlap": {"w": WEIGHT, "v": WEIGHT},
    "dtype": {"w": {**WEIGHT, "dtype": "Q4"}},
    "no dtype": {"w": {"shape": [4, 4]}},
    "list": [1],
    "word": {"w": "x"},
    "number in the text": {"__metadata__": {"a": 1}, "w": WEIGHT},
    "list of text": {"__metadata__": [1], "w": WEIGHT},
    "NaN": b'{"w":NaN}',
    "no UTF-8": b'{"\xff":1}',
    "deep": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
}


@pytest.mark.parametrize("lie", LIES)
def test_lying_safetensors(lie: str, tmp_path: Path) -> None:
    said, path = LIES[lie], tmp_path / "a.safetensors"
    header = said if isinstance(said, bytes) else json.dumps(said).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(64))
    read_all(path)
    with pytest.raises(CheckpointError):
        load_model(path, arch=ARCH)


@pytest.mark.parametrize("length", [0, 1, 10**8, 2**40, 2**63, 2**64 - 1])
def test_lengths_of_safetensors(length: int, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", length) + json.dumps({"w": WEIGHT}).encode() + bytes(64))
    read_all(path)
    with pytest.raises(CheckpointError):
        load_model(path, arch=ARCH)


@pytest.mark.parametrize(
    "beside",
    [
        "", "[]", "null", "NaN", "{", "[" * 200_000, '{"a":' * 100_000, "1" * 10**6, "\x00",
        '{"ties": {"a": 1}}', '{"ties": []}', '{"ties": {"a": "b"}}', None,
    ],
    ids=lambda one: str(one)[:20],
)  # fmt: skip
def test_lying_plans_beside_weights(beside: str | None, tmp_path: Path) -> None:
    path = write(tmp_path, "pair.safetensors")
    plan = tmp_path / "pair.plan.json"
    plan.unlink()
    if beside is None:
        plan.mkdir()
    else:
        plan.write_text(beside)
    with pytest.raises(CheckpointError):
        bp_convert.load(path, model=small())
