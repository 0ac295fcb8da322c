"""Roots kept as Kronecker factors against roots written out."""

from __future__ import annotations

import pytest
import torch

from bp_convert.kron.root import Root
from tests.oracles import whole
from tests.tolerances import assert_near

PARTS = {
    "one": (torch.randn(6, 6, dtype=torch.float64).tril() + 6 * torch.eye(6),),
    "a diagonal": (torch.rand(6, dtype=torch.float64) + 1,),
    "two": tuple(torch.randn(n, n, dtype=torch.float64).tril() + 6 * torch.eye(n) for n in (2, 3)),
    "two and a diagonal": (
        torch.randn(2, 2, dtype=torch.float64).tril() + 6 * torch.eye(2),
        torch.rand(3, dtype=torch.float64) + 1,
        torch.randn(2, 2, dtype=torch.float64).tril() + 6 * torch.eye(2),
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_it_acts_as_the_root_written_out(name: str) -> None:
    root = Root(PARTS[name])
    lower = whole(root)
    assert root.size == len(lower)
    for count in (0, 1, 5):
        rows = torch.randn(count, root.size, dtype=torch.float64)
        assert_near(root.times(rows), rows @ lower)
        assert_near(root.solve(rows), rows @ torch.linalg.inv(lower))
        batch = torch.randn(count, root.size, 3, dtype=torch.float64)
        assert_near(root.times_left(batch), lower.t() @ batch)


def test_rows_of_another_dtype_keep_theirs() -> None:
    root = Root(PARTS["two"])
    assert root.times(torch.randn(2, 6)).dtype == torch.float32
    assert root.times_left(torch.randn(2, 6, 3)).dtype == torch.float32
