"""Where the search for factors and their fits to data compute: on the CPU, in float32.

Models stay where they are, and run there on what is looked at. Their weights, and the rows that
their layers meet, come here by ``to_compute``; what is found goes back with ``copy_`` and ``to``
where a kind writes it. Moments and normal equations are in float64 where their modules say so.
The nearest sum to a weight alone, as ``fit_`` of a layer, is computed where the weight is.
"""

from __future__ import annotations

import torch
from torch import Tensor

DEVICE = torch.device("cpu")
DTYPE = torch.float32


def to_compute(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor's numbers as they are computed with: itself, detached, where they are so."""
    return tensor.detach().to(DEVICE, DTYPE if dtype is None else dtype)
