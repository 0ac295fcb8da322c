"""A planner's layers turned into what a budget is spent on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from io import BytesIO
from pickle import Pickler

import torch
from torch import Tensor, nn

from bp_convert.graph.walk import Site
from bp_convert.kinds import Factors, Spread
from bp_convert.search.selection import Budget
from bp_convert.search.units import FACTORS, REPLACED, FreeLayer

# Bytes of a file besides its numbers, their places and the model's other attributes, which are
# counted; from the files of a dozen models, on the safe side:
HEAD = 1900  # its form and its settings,
LINE = 140  # of each module with numbers its line in the plan,
WEIGHTS = 200  # which is longer of one with a weight,
MODULE = 300  # of each module, where it cannot be pickled, its attributes,
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
    places = 0
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
        matrices = site.kind.matrices(site.module, Spread())
        places += REPLACED + FACTORS * sum(map(len, matrices.values()))
    other = size - params * each + rows * each + places + _head(model)
    return Budget(
        before={"params": params, "macs": float(macs or 0), "size": size},
        fixed={"params": fixed, "macs": left, "size": fixed * each + other},
    )


def _weights(site: Site, factors: Factors) -> int:
    """Count the numbers in a twin's factors."""
    matrices = site.kind.matrices(site.module, Spread())
    return sum(len(matrices[role]) * spec.params for role, spec in factors.items())


def _head(model: nn.Module) -> int:
    """Estimate the bytes of the saved file that hold no numbers."""
    found = HEAD + _attributes(model)
    for name, module in model.named_modules():
        weights = [one.dim() > 1 for one in module.parameters(recurse=False)]
        if weights or any(True for _ in module.buffers(recurse=False)):
            found += LINE + len(name) + WEIGHTS * any(weights) + REPLACED * (sum(weights) > 1)
    places = BytesIO()  # as many tensors under these names, but of one number each
    held = {name: one for name, one in model.state_dict().items() if isinstance(one, Tensor)}
    torch.save({name: torch.zeros(1, dtype=one.dtype) for name, one in held.items()}, places)
    return found + places.tell()


class _WithoutTensors(Pickler):
    def persistent_id(self, one: object) -> str | None:
        return "" if isinstance(one, Tensor) else None


def _attributes(model: nn.Module) -> int:
    """Count the bytes of a pickled model without its tensors."""
    file = BytesIO()
    try:
        _WithoutTensors(file, protocol=2).dump(model)
    except Exception:  # whatever the user's classes raise; such a model is not saved whole
        return MODULE * sum(1 for _ in model.modules())
    return file.tell()
