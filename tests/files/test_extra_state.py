"""State besides parameters and buffers is in the file and comes back, or nothing is written."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bp_convert.errors import CheckpointError
from bp_convert.files.converted import read_converted, save_converted
from bp_convert.files.entries import fill, whole_state
from bp_convert.files.read_model import load_model
from bp_convert.files.reread import digests


class Keeps(nn.Module):
    """A layer with extra state of any type."""

    def __init__(self, kept: Any = None) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 3)
        self.kept = kept

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


class Packed(nn.Module):
    """A layer that writes weights of its own making, as quantised layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))
        self.secret = torch.zeros(3)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}secret"] = self.secret

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *more: Any) -> None:
        self.secret = state_dict.pop(f"{prefix}secret")
        super()._load_from_state_dict(state_dict, prefix, *more)


def save(path: Path, model: nn.Module, arch: str | None = "net.py:make") -> list[Path]:
    return save_converted(path, model=model, plan_json="{}", settings_json="{}", arch=arch)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_tensor_comes_back(suffix: str, tmp_path: Path) -> None:
    source = nn.Sequential(Keeps(torch.tensor([5.0])), nn.ReLU())
    path = save(tmp_path / f"out{suffix}", source)[0]
    read = read_converted(path)
    assert read.format == 2
    target = nn.Sequential(Keeps(torch.tensor([1.0, 2.0])), nn.ReLU())  # of another shape
    fill(target, read.state)
    assert torch.equal(target[0].kept, torch.tensor([5.0]))
    target[0].kept.zero_()
    assert read.state["0._extra_state"].item() == 5  # nothing is shared


PLAIN: dict[str, Any] = {
    "amax": [1.0, 2], "on": True, "none": None, "name": "é", "dtype": torch.bfloat16,
    "history": torch.arange(3), "nested": {"a": (1, {2})}, "size": torch.Size([2]),
}  # fmt: skip


def test_plain_values_come_back_from_a_pt_file(tmp_path: Path) -> None:
    source = nn.Sequential(Keeps(PLAIN))
    target = nn.Sequential(Keeps())
    fill(target, read_converted(save(tmp_path / "out.pt", source)[0]).state)
    assert digests({"": target[0].kept}) == digests({"": PLAIN})
    with pytest.raises(CheckpointError, match="a dict, which a safetensors file") as caught:
        save(tmp_path / "out.safetensors", source)
    assert caught.value.where == "0._extra_state (Keeps)"
    assert "NAME.pt" in caught.value.fix
    assert [one.name for one in tmp_path.iterdir()] == ["out.pt"]


def test_objects_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for odd in (Path("x"), [object()], {"deep": {"deeper": Path("x")}}):
        for name in ("out.pt", "out.safetensors"):
            with pytest.raises(CheckpointError, match="state that would be lost"):
                save(tmp_path / name, nn.Sequential(Keeps(odd)))
    assert list(tmp_path.iterdir()) == []
    save(tmp_path / "out.pt", nn.Sequential(Keeps(Path("x"))), arch=None)  # as the error advises
    read = read_converted(tmp_path / "out.pt", trust=["tests"])
    assert read.skeleton is not None


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_weight_by_the_name_of_extra_state(suffix: str, tmp_path: Path) -> None:
    class Named(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.register_buffer("_extra_state", torch.full((2,), value))

    target = Named(1)
    fill(target, read_converted(save(tmp_path / f"out{suffix}", Named(3))[0]).state)
    assert torch.equal(target._extra_state, torch.full((2,), 3.0))


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_weights_that_only_state_dict_knows(suffix: str, tmp_path: Path) -> None:
    source = nn.Sequential(Packed())
    source[0].secret = torch.tensor([1.0, 2, 3])
    target = nn.Sequential(Packed())
    fill(target, read_converted(save(tmp_path / f"out{suffix}", source)[0]).state)
    assert torch.equal(target[0].secret, source[0].secret)
    with pytest.raises(CheckpointError, match=r"no weights for 0\.secret"):
        fill(target, {"0.bias": torch.zeros(2)})


def test_an_int8_model_is_whole_or_not_written(tmp_path: Path) -> None:
    """2 of its 102 entries are parameters or buffers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao.nn.quantized import Conv2d, Linear

        source = nn.Sequential(Conv2d(2, 3, 3), Linear(3, 2))
        source[0].set_weight_bias(
            torch.quantize_per_tensor(torch.randn(3, 2, 3, 3), 0.1, 0, torch.qint8), torch.ones(3)
        )
        with pytest.raises(CheckpointError, match=r"qint8.*safetensors") as caught:
            save(tmp_path / "out.safetensors", source)
        assert caught.value.where == "0.weight (Conv2d)"
        with pytest.raises(CheckpointError, match="incomplete from a pickle") as caught:
            save(tmp_path / "out.pt", source, arch=None)
        assert "(Conv2d)" in caught.value.where
        assert list(tmp_path.iterdir()) == []
        target = nn.Sequential(Conv2d(2, 3, 3), Linear(3, 2))
        fill(target, read_converted(save(tmp_path / "out.pt", source)[0]).state)
        assert digests(whole_state(target)) == digests(whole_state(source))


DRAWS = torch.Generator().manual_seed(0)
BUFFERS = {
    "complex": torch.randn(2, dtype=torch.complex64, generator=DRAWS),
    "conjugate": torch.randn(3, dtype=torch.complex64, generator=DRAWS).conj(),
    "float8": torch.randn(4, generator=DRAWS).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]),
    "uint16": torch.arange(3).to(torch.uint16),
    "number": torch.tensor(7, dtype=torch.int64),
    "nan": torch.tensor(float("nan")),
    "empty": torch.empty(0),
    "empty of three axes": torch.empty(2, 0, 3, dtype=torch.int8),
    "transposed": torch.randn(2, 3, generator=DRAWS).t(),
    "expanded": torch.randn(1, 3, generator=DRAWS).expand(4, 3),
}


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("value", BUFFERS.values(), ids=BUFFERS)
@pytest.mark.parametrize("persistent", [True, False])
def test_buffers_of_any_kind(persistent: bool, value: Tensor, suffix: str, tmp_path: Path) -> None:
    source, target = nn.Linear(1, 1), nn.Linear(1, 1)
    source.register_buffer("table", value, persistent=persistent)
    target.register_buffer("table", torch.empty_like(value.contiguous()), persistent=persistent)
    fill(target, read_converted(save(tmp_path / f"out{suffix}", source)[0]).state)
    assert target.table.dtype == value.dtype
    assert digests(whole_state(target)) == digests(whole_state(source))


def test_what_safetensors_lacks_is_refused(tmp_path: Path) -> None:
    for value, words in (
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.eye(3).to_sparse(), "sparse_coo"),
    ):
        source = nn.Sequential(nn.Linear(1, 1))
        source[0].register_buffer("table", value)
        with pytest.raises(CheckpointError, match=words) as caught:
            save(tmp_path / "out.safetensors", source)
        assert caught.value.where == "0.table (Linear)"
        read = read_converted(save(tmp_path / f"{words}.pt", source)[0])
        assert digests(read.state) == digests(whole_state(source))
    source = nn.Linear(2, 2, device="meta")
    for name in ("a.pt", "a.safetensors"):
        with pytest.raises(CheckpointError, match="no values"):
            save(tmp_path / name, source)
    with pytest.raises(CheckpointError, match="lazy"):
        save(tmp_path / "a.pt", nn.LazyLinear(2))


NET = """
import torch
from tests.files.test_extra_state import Keeps
def make():
    return torch.nn.Sequential(Keeps(torch.tensor([1.0])))
"""


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize("kept", [torch.tensor([5.0, 6.0]), PLAIN, 3.5], ids=["1", "2", "3"])
def test_loaded_with_an_architecture(kept: Any, prefix: str, tmp_path: Path) -> None:
    (tmp_path / "keeping_net.py").write_text(NET)
    source = nn.Sequential(Keeps(kept))
    state = {f"{prefix}{name}": one for name, one in source.state_dict().items()}
    torch.save({"epoch": 3, "state_dict": state}, tmp_path / "w.pth")
    arch = f"{tmp_path / 'keeping_net.py'}:make"
    loaded = load_model(tmp_path / "w.pth", arch=arch)
    assert digests(whole_state(loaded.model)) == digests(whole_state(source))


def test_extra_state_of_unknown_classes_is_not_dropped(tmp_path: Path) -> None:
    (tmp_path / "keeping_net.py").write_text(NET)
    source = nn.Sequential(Keeps(slice(1, 2)))
    torch.save(source.state_dict(), tmp_path / "w.pth")
    arch = f"{tmp_path / 'keeping_net.py'}:make"
    with pytest.raises(CheckpointError, match="extra state that holds") as caught:
        load_model(tmp_path / "w.pth", arch=arch)
    assert "0._extra_state" in caught.value.where
    loaded = load_model(tmp_path / "w.pth", arch=arch, allow_missing=True)
    assert any("left out: 0._extra_state" in note for note in loaded.notes)
    assert torch.equal(loaded.model[0].kept, torch.tensor([1.0]))
