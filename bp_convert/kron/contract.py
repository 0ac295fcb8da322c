"""The contraction Y = sum_r w1[r] X w2[r] in two matrix products, without building the weight, and
its gradients, which need not keep what stands between the two."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bp_convert.torch_private import is_differentiated_plainly, without_view
from bp_convert.values.factors import FactorSpec

LARGE = 2**16  # numbers between the two products, from which on they are worth another product


def w2_first(k1: int, k2: int, d1: int, d2: int) -> bool:
    """Return whether contracting with w2 before w1 takes fewer multiply-adds.

    A tie goes to w1: both orders infer equally fast, but this one's gradients are cheaper.
    """
    return d1 * k2 * (d2 + k1) < k1 * d2 * (d1 + k2)


def order_costs(spec: FactorSpec) -> tuple[int, int]:
    """Return the multiply-adds of one row with w2 first, and with w1 first."""
    (k1, k2), (d1, d2), rank = spec.out, spec.inp, spec.rank
    return rank * d1 * k2 * (d2 + k1), rank * k1 * d2 * (d1 + k2)


def bilinear_macs(spec: FactorSpec) -> int:
    """Return the multiply-adds of one row in the order that ``bilinear`` takes."""
    return min(order_costs(spec))


def bilinear(x: Tensor, w1: Tensor, w2: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply ``sum_r kron(w1[r], w2[r]^T)`` to the last axis of ``x`` (paper, eq. 4), then a bias.

    The R terms lie side by side, so that there are two products whatever R is, in the cheaper
    order. Only factors are ever laid out anew, and with one term not even they. Low rank, which is
    the pair Kx1 with 1xD, is two of torch's linear layers. Backward keeps what stands between the
    two products where it is a small part of ``x``, as in low rank; else it is computed again.

    Shape:
        x: (..., d1*d2); w1: (R, k1, d1); w2: (R, d2, k2); bias: (k1*k2);
        result: (..., k1*k2).
    """
    rank, k1, d1 = w1.shape
    _, d2, k2 = w2.shape
    fused = bias is None or bias.dtype == w1.dtype
    if d1 == k2 == 1:
        y = F.linear(x, w2.flatten(1))  # (..., R)
        y = F.linear(y, w1.flatten(1).t(), bias if fused else None)
        return y if fused else _plus(y, bias)
    given = (x, w1, w2) if bias is None else (x, w1, w2, bias)
    if fused and torch.is_grad_enabled() and is_differentiated_plainly(*given):
        between = d1 * rank * k2 if w2_first(k1, k2, d1, d2) else k1 * rank * d2  # of a row
        rows = x.numel() // (d1 * d2)
        if rows * between >= LARGE and 4 * between > d1 * d2 and not k1 == d2 == 1:
            made: Tensor = TwoProducts.apply(x, w1, w2, bias)
            return made
    return _two_products(x, w1, w2, bias)


def _two_products(x: Tensor, w1: Tensor, w2: Tensor, bias: Tensor | None) -> Tensor:
    rank, k1, d1 = w1.shape
    _, d2, k2 = w2.shape
    fused = bias is None or bias.dtype == w1.dtype
    if w2_first(k1, k2, d1, d2):
        if rank == 1:  # laid out as it is; on few rows each call counts
            right, left = w2.reshape(d2, k2), w1.reshape(k1, d1)
        else:
            right = w2.transpose(0, 1).reshape(d2, rank * k2)  # (d2, R*k2)
            left = w1.permute(1, 2, 0).reshape(k1, d1 * rank)  # (k1, d1*R)
        t = x.reshape(-1, d2) @ right  # (N*d1, R*k2)
        t = t.view(-1, d1 * rank, k2)
        if fused and bias is not None and k2 > 1:  # the last product adds it
            y = torch.baddbmm(bias.view(k1, k2), left.expand(t.shape[0], -1, -1), t)
            return shaped(y, (*x.shape[:-1], k1 * k2))
        y = _on_each(left, t)  # (N, k1, k2)
    else:
        if rank == 1:
            left, right = w1.reshape(k1, d1), w2.reshape(d2, k2)
        else:
            left = w1.transpose(0, 1).reshape(k1 * rank, d1)  # (k1*R, d1)
            right = w2.reshape(rank * d2, k2)  # (R*d2, k2)
        t = _on_each(left, x.reshape(-1, d1, d2))  # (N, k1*R, d2)
        y = t.view(-1, rank * d2) @ right  # (N*k1, k2)
    return _plus(shaped(y, (*x.shape[:-1], k1 * k2)), bias)


class TwoProducts(torch.autograd.Function):
    """Both products of a contraction, of which backward keeps inputs and factors only.

    What stands between the products is computed again there, by the first of them. Its gradients
    are operations of torch's, and can be differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, w2: Tensor, bias: Tensor | None) -> Tensor:
        """Do as ``bilinear``."""
        ctx.save_for_backward(x, w1, w2)
        with torch.enable_grad():  # so that no view is given back
            bias = None if bias is None else bias.detach()
            return _two_products(x.detach(), w1.detach(), w2.detach(), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of all four, those that are asked for."""
        (x, w1, w2), (g,), asked = ctx.saved_tensors, grads, ctx.needs_input_grad
        (rank, k1, d1), (_, d2, k2) = w1.shape, w2.shape
        dx = dw1 = dw2 = None
        by_bias = g.reshape(-1, k1 * k2).sum(0) if asked[3] else None
        if w2_first(k1, k2, d1, d2):
            right = w2.transpose(0, 1).reshape(d2, rank * k2)
            left = w1.permute(1, 2, 0).reshape(k1, d1 * rank)
            flat = x.reshape(-1, d2)  # (N*d1, d2)
            g = g.reshape(-1, k1, k2)
            if asked[1]:
                t = (flat @ right).view(-1, d1 * rank, k2)
                dw1 = _over_rows(g, t).view(k1, d1, rank).permute(2, 0, 1)
                del t
            if asked[0] or asked[2]:
                t = _on_each(left.t(), g).reshape(-1, rank * k2)  # (N*d1, R*k2)
                dx = (t @ right.t()).view(x.shape) if asked[0] else None
                if asked[2]:
                    dw2 = (flat.t() @ t).view(d2, rank, k2).transpose(0, 1)
        else:
            left = w1.transpose(0, 1).reshape(k1 * rank, d1)
            right = w2.reshape(rank * d2, k2)
            apart = x.reshape(-1, d1, d2)
            g = g.reshape(-1, k2)  # (N*k1, k2)
            if asked[2]:
                t = _on_each(left, apart).reshape(-1, rank * d2)  # (N*k1, R*d2)
                dw2 = (t.t() @ g).view(rank, d2, k2)
                del t
            if asked[0] or asked[1]:
                t = (g @ right.t()).view(-1, k1 * rank, d2)
                dx = _on_each(left.t(), t).reshape(x.shape) if asked[0] else None
                if asked[1]:
                    dw1 = _over_rows(t, apart).view(k1, rank, d1).transpose(0, 1)
        return dx, dw1, dw2, by_bias


def _over_rows(one: Tensor, other: Tensor) -> Tensor:
    """Sum ``one[n] other[n]^T`` over the rows: (N, a, c), (N, b, c) -> (a, b).

    In one product on copies, or in one for each row and a sum, by which holds fewer numbers.
    """
    (_, a, c), b = one.shape, other.shape[1]
    if a * b <= c * (a + b) and c > 1:
        return torch.bmm(one, other.transpose(1, 2)).sum(0)
    one, other = one.transpose(0, 1).reshape(a, -1), other.transpose(0, 1).reshape(b, -1)
    return one @ other.t()


def _plus(y: Tensor, bias: Tensor | None) -> Tensor:
    """Add a bias to a product that nothing needs again: the sum takes its place."""
    return y if bias is None else y.add_(bias if bias.dtype == y.dtype else bias.to(y.dtype))


def bilinear_each(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Apply to each of S blocks of rows a sum of its own, in two batched products.

    Shape:
        x: (S, n, d1*d2); w1: (S, R, k1, d1); w2: (S, R, d2, k2); result: (S, n, k1*k2).
    """
    many, rank, k1, d1 = w1.shape
    d2, k2 = w2.shape[2:]
    rows = x.shape[1]
    if w2_first(k1, k2, d1, d2):
        right = w2.transpose(1, 2).reshape(many, d2, rank * k2)
        left = w1.permute(0, 2, 3, 1).reshape(many, k1, d1 * rank)
        t = torch.bmm(x.reshape(many, rows * d1, d2), right)  # (S, n*d1, R*k2)
        t = t.view(many, rows, d1 * rank, k2).transpose(1, 2)
        y = torch.bmm(left, t.reshape(many, d1 * rank, rows * k2))  # (S, k1, n*k2)
        y = y.view(many, k1, rows, k2).transpose(1, 2)
    else:
        left = w1.transpose(1, 2).reshape(many, k1 * rank, d1)
        right = w2.reshape(many, rank * d2, k2)
        t = x.reshape(many, rows, d1, d2).transpose(1, 2).reshape(many, d1, rows * d2)
        t = torch.bmm(left, t).view(many, k1 * rank, rows, d2).transpose(1, 2)
        y = torch.bmm(t.reshape(many, rows * k1, rank * d2), right)  # (S, n*k1, k2)
    return y.reshape(many, rows, k1 * k2)


def shaped(y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a product that nothing else holds in another shape, not as a view of it.

    What is done to a view in place (a bias added, ``nn.ReLU(inplace=True)``) is undone in
    backward by copying the whole gradient, each time.
    """
    if not torch.is_grad_enabled():
        return y.reshape(shape)  # the same, in less time
    return without_view(y.contiguous(), shape)


def _on_each(left: Tensor, rows: Tensor) -> Tensor:
    """Multiply each matrix of a batch from the left: (a, b), (N, b, c) -> (N, a, c).

    A batched product on an expanded factor runs up to twice as fast as a broadcast ``matmul``,
    which folds the batch and copies it to do so wherever gradients are wanted.
    """
    if rows.shape[2] == 1:
        return (rows.squeeze(2) @ left.t()).unsqueeze(2)
    return torch.bmm(left.expand(rows.shape[0], -1, -1), rows)
