"""Spectra by Gram matrices that pairs share are those of each pair on its own."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from bp_convert.kron import shared_grams
from bp_convert.kron.column_order import Columns
from bp_convert.kron.conv_layout import every_axes
from bp_convert.kron.gram import gram, traced
from bp_convert.kron.metric import Full, Metric, Plain
from bp_convert.kron.nearest import rearrange
from bp_convert.kron.pairs import divisor_pairs
from bp_convert.kron.shared_grams import SharedGrams
from bp_convert.kron.spectrum import whitened
from bp_convert.values.factors import FactorSpec
from tests.oracles import spread_moment
from tests.tolerances import assert_near

Case = tuple[FactorSpec, Columns]


def _cases(outputs: int, channels: int, kernel: tuple[int, ...]) -> list[Case]:
    found = []
    for axes in every_axes(kernel):
        for one in divisor_pairs(channels):
            columns = Columns(one, kernel, axes)
            for out in divisor_pairs(outputs):
                found.append((FactorSpec(out=out, inp=columns.inp, axes=axes), columns))
    return found


def _tails(weight: Tensor, spec: FactorSpec, columns: Columns, metric: Metric) -> Tensor:
    """Return the exact law by a whole SVD in float64."""
    table = whitened(weight.double(), metric, columns)
    squares = torch.linalg.svdvals(rearrange(table, spec.out, spec.inp)).square()
    tails = torch.cat([squares.flip(0).cumsum(0).flip(0), squares.new_zeros(1)])
    return tails / tails[0] if tails[0] > 0 else tails


def _found(shared: SharedGrams, weight: Tensor, case: Case, metric: Metric, name: str) -> Tensor:
    spec, columns = case
    return shared.squared_errors(
        name, lambda: whitened(weight, metric, columns), weight.dtype, spec, columns
    )


def _degenerate() -> dict[str, Tensor]:
    torch.manual_seed(0)
    whole = torch.randn(12, 48, dtype=torch.float64)
    return {
        "whole": whole,
        "rank 2": torch.randn(12, 2, dtype=torch.float64) @ torch.randn(2, 48, dtype=torch.float64),
        "equal values": torch.linalg.qr(whole.t())[0].t().contiguous(),
        "zeros": torch.zeros(12, 48, dtype=torch.float64),
        "tiny": whole * 1e-30,
        "bfloat16": whole.bfloat16().double(),
    }


@pytest.mark.parametrize("order", ["as they come", "backwards", "mixed"])
@pytest.mark.parametrize("name", _degenerate())
def test_every_pair_of_a_convolution_has_its_own_spectrum(name: str, order: str) -> None:
    weight = _degenerate()[name]
    cases = _cases(12, 8, (2, 3))
    if order == "backwards":
        cases.reverse()
    elif order == "mixed":
        random.Random(0).shuffle(cases)
    shared = SharedGrams()
    for case in cases:
        found = _found(shared, weight, case, Plain(), "weight")
        expected = _tails(weight, *case, Plain())
        assert found.shape == expected.shape == (case[0].full_rank + 1,)
        assert found[1:].tolist() == pytest.approx(expected[1:].tolist(), rel=1e-9, abs=1e-14)
        assert float(found[0]) == pytest.approx(float(expected[0])) or name == "zeros"


def test_few_products_of_the_whole_weight_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0]
    plain = shared_grams.gram_of

    def counted(*args: object, **more: object) -> Tensor:
        calls[0] += 1
        return plain(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(shared_grams, "gram_of", counted)
    shared, weight = SharedGrams(), torch.randn(64, 64)
    cases = sorted(_cases(64, 64, ()), key=lambda one: -one[0].full_rank)
    for case in cases:
        _found(shared, weight, case, Plain(), "weight")
    assert len(cases) == 49
    assert calls[0] <= 16


def test_float32_beyond_the_exact_side_agrees_to_rounding() -> None:
    weight = torch.randn(96, 60 * 9) / torch.arange(1, 60 * 9 + 1) ** 0.5
    shared = SharedGrams()
    for spec, columns in sorted(_cases(96, 60, (3, 3)), key=lambda one: -one[0].full_rank)[::7]:
        found = _found(shared, weight, (spec, columns), Plain(), "weight")
        expected = _tails(weight, spec, columns, Plain())
        bound = 1e-11 if spec.full_rank <= shared_grams.EXACT else 2e-6
        assert float((found - expected).abs().max()) < bound, spec


def test_small_sides_do_not_come_from_float32() -> None:
    """A part of a large pair's Gram matrix in float32 would hold its rounding."""
    weight = torch.randn(512, 1) @ torch.randn(1, 768) + 1e-6 * torch.randn(512, 768)
    shared = SharedGrams()
    for out, inp in (((512, 1), (1, 768)), ((256, 2), (1, 768))):
        spec, columns = FactorSpec(out=out, inp=inp), Columns(inp)
        found = _found(shared, weight, (spec, columns), Plain(), "weight")
    expected = _tails(weight, spec, columns, Plain())
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-15)


def test_tables_of_other_sources_are_kept_apart() -> None:
    one, two = torch.randn(2, 12, 16, dtype=torch.float64)
    shared, case = SharedGrams(), (FactorSpec(out=(4, 3), inp=(4, 4)), Columns((4, 4)))
    first = _found(shared, one, case, Plain(), "one")
    assert not torch.allclose(first, _found(shared, two, case, Plain(), "two"))
    assert torch.equal(first, _found(shared, two, case, Plain(), "one"))  # as it was told


def test_outputs_are_shared_in_a_metric() -> None:
    weight = torch.randn(12, 24, dtype=torch.float64)
    metric, shared = Full(spread_moment(24)), SharedGrams()
    for case in _cases(12, 24, ()):
        found = _found(shared, weight, case, metric, str(case[1]))
        expected = _tails(weight, *case, metric)
        assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-8, abs=1e-13)


def test_what_is_held_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_grams, "HELD", 3000)
    weight, shared = torch.randn(12, 24, dtype=torch.float64), SharedGrams()
    for case in _cases(12, 24, ()):
        found = _found(shared, weight, case, Plain(), "weight")
        expected = _tails(weight, *case, Plain())
        assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-9, abs=1e-14)
        held = [one.gram for ones in shared._held.values() for one in ones]
        assert sum(one.numel() * one.element_size() for one in held) <= 3000


@pytest.mark.parametrize("rows", [1, 5, 64, 65, 200, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gram_matrix_is_the_product(rows: int, dtype: torch.dtype) -> None:
    table = torch.randn(rows, 7)
    found = gram(table, dtype)
    assert found.dtype == dtype
    assert_near(found, found.t())
    torch.testing.assert_close(found, (table.double() @ table.double().t()).to(dtype))
    torch.testing.assert_close(gram(table.bfloat16()), gram(table.bfloat16().double()))


def test_a_partial_trace_moves_indices_to_the_columns() -> None:
    table = torch.randn(2, 3, 4, 5, 7, dtype=torch.float64)
    whole = gram(table.reshape(120, 7))
    for summed in ((), (1,), (1, 3), (0, 2), (0, 1, 2, 3)):
        stay = [place for place in range(4) if place not in summed]
        rows = table.permute(*stay, *summed, 4)
        side = torch.Size([table.shape[place] for place in stay]).numel()
        torch.testing.assert_close(
            traced(whole, (2, 3, 4, 5), summed), gram(rows.reshape(side, -1))
        )
