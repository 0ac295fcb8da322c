"""Grids: what rounding loses at most, what it takes, and that bytes give every bit back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bp_convert.bits.compensated import rounded_in
from bp_convert.bits.grid import FORMS, GROUP, Grid, found_again, takes
from bp_convert.bits.packing import pack, packed, unpack, unpacked

SHAPES = [
    (64, 33),
    (7, 384),
    (5, 64, 1),
    (6, 8, 9),
    (16, 9, 3, 3),
    (3, 4, 50, 40),
    (512, 1),
    (2, 1),
]
GRIDS = {name: form for name, form in FORMS.items() if isinstance(form, Grid)}


def drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 0.03).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_bytes_give_every_bit_back(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    form = FORMS[name]
    near = form.rounded(drawn(shape, dtype))
    parts = pack(near, form)
    assert parts is not None
    assert torch.equal(unpack(parts, form, shape, dtype), near)
    assert sum(one.numel() * one.element_size() for one in parts.values()) == form.nbytes(shape)


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_of_any_width_are_packed_tight(bits: int) -> None:
    grid = Grid(bits)
    codes = torch.randint(grid.low, -grid.low, (101,)).double()
    data = packed(codes, grid)
    assert len(data) <= -(-101 * bits // 8) + len(grid.planes())
    assert torch.equal(unpacked(data, grid, 101).double(), codes)


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("seed", range(5))
def test_a_number_moves_by_at_most_half_a_step_or_what_is_clipped(name: str, seed: int) -> None:
    grid = GRIDS[name]
    weight = drawn((32, 128), seed=seed)
    groups = grid.grouped(weight)
    step = 2 * groups.abs().amax(2, keepdim=True) / (1 << grid.bits)
    whole = grid.rounded(
        weight, grid.flat((groups.new_zeros(()) + step).expand_as(groups), (32, 128))
    )
    gap = grid.grouped(whole) - groups
    clipped = groups > (-grid.low - 0.5) * step  # has no code of its own
    assert (gap.abs() <= step * (0.5 + 1e-4)).logical_or(clipped).all()
    assert (gap.abs() <= step * 1.001).all()
    # What is searched for errs no more than the scale that clips nothing on the side of its sign.
    near = grid.rounded(weight)
    assert float((near - weight).square().sum()) <= 1.05 * float(gap.square().sum())
    bound = {8: 0.012, 4: 0.12, 3: 0.24}[grid.bits]
    assert 0 < float((near - weight).norm() / weight.norm()) < bound


def test_fewer_bits_lose_more_and_take_less() -> None:
    weight = drawn((64, 256))
    lost = [float((one.rounded(weight) - weight).norm()) for one in GRIDS.values()]
    assert lost == sorted(lost)
    assert [one.nbytes((64, 256)) for one in GRIDS.values()] == [
        64 * 256 + 2 * 64,
        64 * 256 // 2 + 2 * 64 * 256 // GROUP,
        64 * 256 * 3 // 8 + 2 * 64 * 256 // GROUP,
    ]


@pytest.mark.parametrize("name", GRIDS)
def test_zeros_stay_zeros_and_rounded_numbers_stay(name: str) -> None:
    grid = GRIDS[name]
    weight = drawn((16, 64))
    weight[3] = 0
    near = grid.rounded(weight)
    assert not near[3].any()
    assert not torch.signbit(near[3]).any()
    assert found_again(near, grid) is not None
    assert found_again(near + 1e-5, grid) is None


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("seed", range(4))
def test_making_up_for_rounding_never_raises_the_error(name: str, seed: int) -> None:
    grid = GRIDS[name]
    generator = torch.Generator().manual_seed(seed)
    weight = drawn((24, 96), seed=seed)
    rows = torch.randn(400, 96, generator=generator) @ torch.randn(96, 96, generator=generator)
    metric = rows.t() @ rows / 400 if seed else torch.diag(torch.rand(96) + 0.1)
    scales = grid.scales(weight)
    made = rounded_in(weight, scales, grid, metric)
    assert found_again(made, grid) is not None

    def energy(gap: Tensor) -> float:
        return float(((gap @ metric) * gap).sum())

    made_up, nearest = energy(made - weight), energy(grid.rounded(weight) - weight)
    assert made_up <= nearest * (1 + 1e-5)
    assert made_up < 0.8 * nearest or not seed


def test_small_tensors_and_biases_are_not_taken() -> None:
    assert takes(torch.zeros(32, 16))
    assert not takes(torch.zeros(31, 16))
    assert not takes(torch.zeros(4096))
    assert not takes(torch.zeros(32, 16, dtype=torch.int64))
