"""Slices of one storage are a tie only where they meet: against the sets of bytes they cover."""

from __future__ import annotations

import tempfile
import time
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import bp_convert
from bp_convert.graph import overlap
from bp_convert.graph.overlap import meetings


class _Two(nn.Module):
    """Two modules, each with one of two parameters."""

    def __init__(self, one: Tensor, two: Tensor) -> None:
        super().__init__()
        self.a, self.b = nn.Module(), nn.Module()
        for module, data in ((self.a, one), (self.b, two)):
            data = data if isinstance(data, nn.Parameter) else nn.Parameter(data, False)
            module.register_parameter("w", data)


def _how(one: Tensor, two: Tensor) -> str:
    model = _Two(one, two)
    found = meetings(model)
    pairs = [found.get(id(model.a.w), []), found.get(id(model.b.w), [])]
    if not pairs[0]:
        assert not pairs[1]
        return ""
    assert [(how, held.name) for how, held in pairs[0] if held.module is model.b] == [
        (pairs[0][0][0], "b.w")
    ]
    return pairs[0][0][0]


def _places(tensor: Tensor) -> set[int]:
    index = torch.arange(tensor.untyped_storage().nbytes() // tensor.element_size())
    return set(
        index.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).flatten().tolist()
    )


def test_all_small_views_of_one_storage() -> None:
    """Exhaustive: every two views of twelve numbers, of up to 2 x 3, against sets of places."""
    flat = torch.zeros(12)
    views = []
    for shape in ((1,), (3,), (2, 2), (2, 3)):
        for steps in product((0, 1, 2, 3, 5), repeat=len(shape)):
            last = sum((n - 1) * s for n, s in zip(shape, steps, strict=True))
            views += [flat.as_strided(shape, steps, at) for at in range(0, 12 - last, 2)]
    assert len(views) > 200
    generator = torch.Generator().manual_seed(0)
    for i, j in torch.randint(len(views), (3000, 2), generator=generator).tolist():
        one, two = views[i], views[j]
        assert bool(_how(one, two)) == bool(_places(one) & _places(two)), (
            one.stride(),
            two.stride(),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_words_for_each_way_of_sharing(dtype: torch.dtype, device: str) -> None:
    matrix = torch.zeros(8, 6, dtype=dtype, device=device)
    assert _how(matrix[:, :3], matrix[:, 3:]) == ""  # columns, interleaved
    assert _how(matrix[::2], matrix[1::2]) == ""  # every other row
    assert _how(matrix[:4], matrix[4:]) == ""
    assert _how(matrix[:, :4], matrix[:, 3:]) == "shares memory with"
    assert _how(matrix[:5], matrix[4:]) == "shares memory with"
    assert _how(matrix, matrix) == "is tied to"
    assert _how(matrix, matrix.T) == "shares memory with"
    assert _how(matrix, torch.zeros(8, 6, dtype=dtype, device=device)) == ""
    same = nn.Parameter(matrix, requires_grad=False)
    assert _how(same, same) == "is tied to"
    empty = torch.zeros(0, dtype=dtype, device=device)
    assert _how(empty, empty) == ""


def test_views_of_another_dtype_are_measured_in_bytes() -> None:
    flat = torch.zeros(16)
    assert _how(flat[:8], flat.view(torch.int16)[16:]) == ""
    assert _how(flat[:8], flat.view(torch.int16)[15:]) == "shares memory with"


def test_a_question_that_costs_too_much_is_taken_for_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "WORK", 1)
    flat = torch.zeros(10_000)
    one = flat.as_strided((9, 9, 9), (101, 37, 12))
    two = flat.as_strided((9, 9, 9), (103, 41, 14), 7)
    assert _how(one, two) == "may share memory with"


def test_large_interleaved_views_take_no_time() -> None:
    base = torch.empty(4096, 4096, 9, device="meta")
    start = time.perf_counter()
    assert _how(base[:, :2048], base[:, 2048:]) == ""
    assert _how(base[:, ::2, ::2], base[:, 1::2, 1::2]) == ""
    assert time.perf_counter() - start < 2


@pytest.mark.slow
def test_a_flat_buffer_of_many_layers_takes_no_time() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3000)))
    vector_to_parameters(
        parameters_to_vector(model.parameters()).detach().clone(), model.parameters()
    )
    start = time.perf_counter()
    assert meetings(model) == {}
    assert time.perf_counter() - start < 5


class _Columns(nn.Module):
    """Two layers whose weights are the columns of one matrix, and a third that looks into both."""

    def __init__(self, *, third: bool) -> None:
        super().__init__()
        both = torch.randn(64, 128)
        self.a, self.b, self.c = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.a.weight = nn.Parameter(both[:, :64])
        self.b.weight = nn.Parameter(both[:, 64:])
        if third:
            self.c.weight = nn.Parameter(both[:, 32:96])
        self.last = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.c(self.b(self.a(x).relu()).relu()).relu())


def test_columns_of_one_matrix_convert() -> None:
    model = _Columns(third=False).eval()
    small, _ = bp_convert.convert(model, inputs=["64"], rank=10**6, convert_anyway=True)
    assert [type(one).__name__ for one in small.children()] == ["BPLinear"] * 3 + ["Linear"]
    x = torch.randn(3, 64)
    torch.testing.assert_close(small(x), model(x), rtol=1e-3, atol=1e-4)


def test_weights_that_overlap_stay_and_say_with_what() -> None:
    plan = bp_convert.plan(_Columns(third=True), inputs=["64"], convert_anyway=True)
    reasons = {one.name: one.reason for one in plan.layers}
    assert reasons["a"] == "its weight shares memory with c.weight"
    assert reasons["b"] == "its weight shares memory with c.weight"
    assert reasons["c"] == "its weight shares memory with a.weight"


def _large() -> nn.Sequential:
    return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 4))


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("rank", [4, 10**6])
def test_a_flat_buffer_is_not_written_whole(suffix: str, rank: int) -> None:
    """The kept layer is a slice of a buffer that is a hundred times larger."""
    model = _large()
    flat = parameters_to_vector(model.parameters()).detach().clone()
    vector_to_parameters(flat, model.parameters())
    small, _ = bp_convert.convert(model, inputs=["512"], rank=rank, convert_anyway=True)
    assert type(small[0]).__name__ == "BPLinear"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"s{suffix}"
        bp_convert.save(small, path)
        held = sum(t.numel() * t.element_size() for t in small.state_dict().values())
        assert path.stat().st_size < held + 20_000
        x = torch.randn(2, 512)
        again = bp_convert.load(path, model=_large)
        torch.testing.assert_close(again(x), small(x))
