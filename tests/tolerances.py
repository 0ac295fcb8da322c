"""The one table of tolerances, relative to the largest expected value.

float64 holds exact identities; float32 sums of a few hundred products round at 1e-6 each;
half types keep 11 or 8 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

RELATIVE = {
    torch.float64: 1e-11,
    torch.float32: 2e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
}


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Fail unless shapes agree and no value is further off than the dtype's tolerance."""
    actual, expected = actual.detach(), expected.detach()
    scale = float(expected.double().abs().max()) if expected.numel() else 1.0
    bound = RELATIVE[dtype or actual.dtype] * max(scale, 1e-30)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=bound)
