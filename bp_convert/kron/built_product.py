"""A product with a dense weight that is built of its factors in forward and again in backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bp_convert.kron.contract import shaped
from bp_convert.kron.nearest import rearrange, reconstruct
from bp_convert.values.factors import FactorSpec


def pays_to_build(factored: float, spec: FactorSpec, rows: int) -> bool:
    """Return whether a training step on so many rows costs less on the dense weight.

    In units of the dense weight by one row: each of the three products of forward and backward
    takes one a row, building the weight and both factors' gradients R each, and it is built twice.
    On factors the products are small but in low rank, and half as efficient.

    Args:
        factored: multiply-adds of a row on the factors.
        rows: of a linear layer; of a convolution the places of its output.
    """
    (k1, k2), (d1, d2) = spec.out, spec.inp
    dense = k1 * k2 * d1 * d2
    factored *= 1 if spec.reach == 1 else 2
    return 3 * rows * (factored - dense) > 4 * spec.rank * dense


def built_product(x: Tensor, w1: Tensor, w2: Tensor, bias: Tensor | None) -> Tensor:
    """Apply ``F.linear`` with the weight ``sum_r kron(w1[r], w2[r]^T)``, of which only the factors
    are kept for backward.

    Shape:
        x: (..., d1*d2); w1: (R, k1, d1); w2: (R, d2, k2); bias: (k1*k2); result: (..., k1*k2).
    """
    y: Tensor = BuiltProduct.apply(x, w1, w2, bias)
    return y


class BuiltProduct(torch.autograd.Function):
    """Its gradients are operations of torch's, and can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w2: Tensor, bias: Tensor | None) -> Tensor:
        """Build the weight and multiply by it."""
        ctx.save_for_backward(x, w1, w2)
        y = F.linear(x.reshape(-1, x.shape[-1]), reconstruct(w1, w2), bias)
        with torch.enable_grad():  # so that no view is given back
            return shaped(y, (*x.shape[:-1], y.shape[1]))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of all four, those that are asked for."""
        (x, w1, w2), (g,), asked = ctx.saved_tensors, grads, ctx.needs_input_grad
        (rank, k1, d1), (_, d2, k2) = w1.shape, w2.shape
        dx = dw1 = dw2 = None
        g = g.reshape(-1, k1 * k2)
        if asked[0]:
            dx = (g @ reconstruct(w1, w2)).view(x.shape)
        if asked[1] or asked[2]:
            table = rearrange(g.t() @ x.reshape(-1, d1 * d2), (k1, k2), (d1, d2))
            if asked[1]:
                turned = w2.transpose(1, 2).reshape(rank, k2 * d2)
                dw1 = (turned @ table.t()).view(rank, k1, d1)
            if asked[2]:
                dw2 = (w1.reshape(rank, -1) @ table).view(rank, k2, d2).transpose(1, 2)
        return dx, dw1, dw2, g.sum(0) if asked[3] else None
