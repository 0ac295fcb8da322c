"""A planner's layers turned into what a budget is spent on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from bp_convert.graph.walk import Site
from bp_convert.kinds import Factors, Spread
from bp_convert.search.selection import Budget
from bp_convert.search.units import FreeLayer

# Bytes of a file that are no numbers, from the files of a dozen models, on the safe side:
HEAD = 3300  # its form and its settings,
TENSOR = 110  # of each tensor its place and shape,
LETTER = 7  # each letter of their names,
LAYER = 1740  # of each layer its line in the plan,
MATRIX = 200  # and of each of its matrices the factors,
TRIED = 1300  # what was tried on examples held out


def budget_for(
    model: nn.Module,
    layers: Sequence[FreeLayer],
    decided: Mapping[str, tuple[Site, Factors]],
    macs: int | None,
    tied: Collection[str] = (),
) -> Budget:
    """Count what stays whatever is chosen.

    Args:
        tied: layers whose weight is another's.
        decided: layers whose factors a rule has settled.
        macs: multiply-adds of one example through the source; None where not known.
    """
    held = {id(t): t for t in (*model.parameters(), *model.buffers())}
    size = sum(t.numel() * t.element_size() for t in held.values())
    params = sum(p.numel() for p in model.parameters())
    each = next((p.element_size() for p in model.parameters() if p.is_floating_point()), 4)
    fixed = float(params)
    rows = 0  # numbers that twins keep beside their parameters
    left = float(macs or 0)
    for one in layers:
        kind, module = one.site.kind, one.site.module
        factors = one.any_factors()
        # The twin's biases stand in place of the layer.
        fixed += kind.params(module, one.widths, factors) - _weights(one.site, factors)
        fixed -= kind.params(module, one.widths)
        if one.site.name in tied:
            fixed += one.widths[0] * one.widths[1]
        left -= one.dense_macs
        rows += kind.buffers(module, one.widths)
    for site, factors in decided.values():
        widths = site.kind.widths(site.module)
        fixed += site.kind.params(site.module, widths, factors)
        fixed -= site.kind.params(site.module, widths)
    other = size - params * each + rows * each + _head(model)
    return Budget(
        before={"params": params, "macs": float(macs or 0), "size": size},
        fixed={"params": fixed, "macs": left, "size": fixed * each + other},
        bytes_each=each,
    )


def _weights(site: Site, factors: Factors) -> int:
    """Count the numbers in a twin's factors."""
    matrices = site.kind.matrices(site.module, Spread())
    return sum(len(matrices[role]) * spec.params for role, spec in factors.items())


def _head(model: nn.Module) -> int:
    """Estimate the bytes of the saved file that hold no numbers."""
    names = list(model.state_dict())
    counts = [
        sum(weight.dim() > 1 for weight in module.parameters(recurse=False))
        for module in model.modules()
    ]
    layers = LAYER * sum(map(bool, counts)) + MATRIX * sum(counts)
    return HEAD + TENSOR * len(names) + LETTER * sum(map(len, names)) + layers
