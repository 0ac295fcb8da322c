"""Time the nearest Kronecker sum against a full SVD of the rearranged matrix, and compare errors.

    python benchmarks/nearest.py [--svd-runs N]

Two 4096 x 4096 weights, pairs 64 x 64, R = 8: one of slowly falling singular values, one Gaussian.
The error is compared with the optimum, which the singular values give. Takes some minutes, nearly
all of it in the SVD.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.timing import machine
from bp_convert.kron.nearest import nearest_kronecker_sum, rearrange

SIDE, PAIR, RANK = 4096, (64, 64), 8
OURS_PER_SVD = 5


def falling() -> Tensor:
    """Return a weight whose rearranged matrix is a Gaussian one with columns scaled by 1 / i."""
    table = torch.randn(SIDE, SIDE) / torch.arange(1, SIDE + 1)
    return table.view(*PAIR, *PAIR).transpose(1, 2).reshape(SIDE, SIDE)


def flat() -> Tensor:
    """Return a Gaussian weight: nothing to find, which is the hardest to iterate on."""
    return torch.randn(SIDE, SIDE)


def compare(name: str, weight: Tensor, svd_runs: int) -> None:
    """Print one row: medians, their ratio, and the error over the optimum."""
    table = rearrange(weight, PAIR, PAIR)
    ours: list[float] = []
    full: list[float] = []
    nearest_kronecker_sum(weight, PAIR, PAIR, RANK)  # warm up
    for _ in range(svd_runs):
        for _ in range(OURS_PER_SVD):
            start = time.perf_counter()
            fit = nearest_kronecker_sum(weight, PAIR, PAIR, RANK)
            ours.append(time.perf_counter() - start)
        start = time.perf_counter()
        values = torch.linalg.svd(table, full_matrices=False).S.double()
        full.append(time.perf_counter() - start)
    best = float((values[RANK:].square().sum() / values.square().sum()).sqrt())
    fast, slow = median(ours), median(full)
    print(
        f"{name:8s} ours {fast:6.3f} s  svd {slow:7.2f} s  ratio {slow / fast:6.1f}"
        f"  error {fit.error:.6f}  optimum {best:.6f}  over {fit.error / best - 1:+.5%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--svd-runs", type=int, default=3)
    runs = parser.parse_args().svd_runs
    torch.manual_seed(0)
    print(f"nearest Kronecker sum, {SIDE}x{SIDE}, pairs 64x64, R={RANK}; {machine()}")
    compare("falling", falling(), runs)
    compare("flat", flat(), runs)


if __name__ == "__main__":
    main()
