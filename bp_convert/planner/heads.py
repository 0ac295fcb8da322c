"""Which of the layers that make the model's output stay dense: by their size and their error."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import sqrt

import torch

from bp_convert.graph.walk import Site
from bp_convert.kinds import prime_reason
from bp_convert.kron.column_order import Columns
from bp_convert.kron.metric import Plain
from bp_convert.kron.spectrum import squared_errors, whitened
from bp_convert.planner.requests import LayerRequest

SMALL = 0.1  # share of all weights up to which heads are not worth their risk
WORSE = 1.1  # times the other layers' error, from which a head is not
ASKED = 8  # layers that a head is compared with
INSIST = "--convert-head converts it"


def head_reasons(
    sites: Sequence[Site], requests: Mapping[str, LayerRequest], heads: Collection[str]
) -> dict[str, str]:
    """Return for each head that had better stay the reason.

    A small head, as of most classifiers, saves next to nothing and reaches the output unsoftened.
    Where heads hold more of the weights than that (a language model's, an autoencoder's, the
    states of a recurrent layer), each is converted like any other layer, unless by its weights it
    would lose more than those do. Under ``pairs="paper"`` all stay (paper, section IV).

    Args:
        sites: the layers that could be converted, heads among them.
        heads: names of those that make the output.
    """
    found = [site for site in sites if site.name in heads and not requests[site.name].insists]
    by_paper = [site for site in found if requests[site.name].ask.pairs == "paper"]
    reasons = {site.name: f"it makes the model's output ({INSIST})" for site in by_paper}
    weighed = [site for site in found if site.name not in reasons]
    others = [site for site in sites if site.name not in heads]
    held = sum(map(_size, weighed))
    share = held / max(1, sum(map(_size, sites)))
    if not others or not weighed:
        return reasons
    if share <= SMALL:
        words = f"it makes the model's output and holds {_percent(share)} of the weights ({INSIST})"
        return reasons | {site.name: words for site in weighed}
    usual = _usual_error(others, requests)
    for site in weighed:
        error = _error(site, requests[site.name])
        if error is not None and usual is not None and error > WORSE * usual:
            words = (
                f"it makes the model's output and would lose {_percent(error)} of its weight's norm"
            )
            reasons[site.name] = f"{words}, other layers {_percent(usual)} ({INSIST})"
    return reasons


def _size(site: Site) -> int:
    return sum(one.numel() for one in site.module.parameters())


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _usual_error(others: Sequence[Site], requests: Mapping[str, LayerRequest]) -> float | None:
    """Return the other layers' relative error, each counted by its size: of the largest few."""
    largest = sorted(others, key=_size, reverse=True)
    total = size = 0.0
    for site in largest[:ASKED]:
        error = _error(site, requests[site.name])
        if error is not None:
            total += _size(site) * error**2
            size += _size(site)
    return sqrt(total / size) if size else None


@torch.no_grad()
def _error(site: Site, request: LayerRequest) -> float | None:
    """Return the relative error of a layer's weights on the factors that it is asked to get; None
    where none fit, or nothing is known of its weights."""
    kind, module = site.kind, site.module
    widths = kind.widths(module)
    if prime_reason(widths, request.ask) or any(one.is_meta for one in module.parameters()):
        return None
    factors = kind.factor(module, widths, request.ask)
    choices = kind.choices(module, widths)
    lost = total = 0.0
    for role, matrices in kind.computed(module, factors).items():
        spec = factors[role]
        for matrix in matrices:
            columns = Columns.of(spec, choices[role].kernel)
            errors = squared_errors(whitened(matrix, Plain(), columns), spec)
            energy = float(matrix.double().square().sum())
            lost += float(errors[min(spec.rank, spec.full_rank)]) * energy
            total += energy
    return sqrt(lost / total) if total > 0 and lost == lost else None
