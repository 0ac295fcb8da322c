"""The comparison that other tests rest on tells a fault from rounding."""

from __future__ import annotations

import pytest
import torch

from bp_convert.kron.contract import bilinear
from tests.oracles import kron_sum
from tests.tolerances import RELATIVE, assert_near


@pytest.mark.parametrize("dtype", RELATIVE)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_what_is_off_by_more_than_the_bound_fails(dtype: torch.dtype, scale: float) -> None:
    right = torch.tensor([1.0, -0.5, 0.001], dtype=torch.float64) * scale
    step = torch.tensor([0.0, 0.0, RELATIVE[dtype] * scale], dtype=torch.float64)
    assert_near(right + 0.9 * step, right, dtype)
    with pytest.raises(AssertionError):
        assert_near(right + 1.1 * step, right, dtype)


def test_shapes_and_missing_numbers_count() -> None:
    with pytest.raises(AssertionError):
        assert_near(torch.zeros(3), torch.zeros(1, 3))
    with pytest.raises(AssertionError):
        assert_near(torch.tensor([float("nan")]), torch.zeros(1))
    with pytest.raises(AssertionError):
        assert_near(torch.zeros(3), torch.full((3,), 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "fault", ["w1 transposed", "w2 transposed", "pair swapped", "term lost", "entry nudged"]
)
def test_a_wrong_kronecker_sum_is_not_near(fault: str, dtype: torch.dtype) -> None:
    w1, w2 = torch.randn(2, 4, 4, dtype=dtype), torch.randn(2, 4, 4, dtype=dtype)
    x = torch.randn(5, 16, dtype=dtype)
    right = x @ kron_sum(w1, w2).t()
    assert_near(bilinear(x, w1, w2), right)
    if fault == "w1 transposed":
        w1 = w1.mT
    elif fault == "w2 transposed":
        w2 = w2.mT
    elif fault == "pair swapped":
        w1, w2 = w2.mT, w1.mT
    elif fault == "term lost":
        w1, w2 = w1[:1], w2[:1]
    else:
        w1 = w1.clone()
        w1[1, 2, 3] += 100 * RELATIVE[dtype]
    with pytest.raises(AssertionError):
        assert_near(bilinear(x, w1, w2), right)
