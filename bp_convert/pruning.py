"""Channel pruning by the norm of weights, to compare with: a narrower model of a given size."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from bp_convert.counting import count_bytes, count_params, with_counts
from bp_convert.errors import PlanError
from bp_convert.fakes.inputs import infer_input
from bp_convert.graph.example import make_inputs
from bp_convert.graph.observe import observe
from bp_convert.graph.others import others_of, shared_by
from bp_convert.graph.walk import Site, walk
from bp_convert.surgery import Converted, apply_plan, fingerprint
from bp_convert.values.literals import Start
from bp_convert.values.plan import LayerPlan, Plan
from bp_convert.values.settings import Settings
from bp_convert.values.tensors import TensorSpec
from bp_convert.widths.channel_map import measure_maps
from bp_convert.widths.narrow import Narrow, narrow

_BATCH = 4  # examples that tell channels apart


def prune(
    model: nn.Module,
    params: int,
    *,
    inputs: Sequence[TensorSpec] = (),
    init: Start = "warm",
    seed: int = 0,
) -> tuple[Converted, Plan]:
    """Prune as ``pipeline.prune`` says; layers that are added to each other are judged together.

    Raises:
        PlanError: the model's widths cannot be followed, or the size is out of reach.
    """
    specs = tuple(inputs) or (infer_input(model) or ((), ""))[0]
    if not specs:
        raise PlanError(
            where=f"{type(model).__name__}, pruned",
            found="no example input is known",
            allowed="an input to run the model on: pruning follows what the forward does",
            fix="describe it with `input`, such as 3x224x224",
        )
    sites = walk(model, bare=False)
    args, kwargs = make_inputs(model, specs, batch=_BATCH)
    targets = {site.name: site.kind.name for site in sites}
    found = narrow(model, args, kwargs, params=params, targets=targets)
    plan = _plan(model, sites, found, specs, init, seed)
    if init == "random":
        return apply_plan(model, plan), plan
    maps = measure_maps(model, plan, args, kwargs, kept=_kept(sites, found))
    return apply_plan(model, plan, maps), plan


def _plan(
    model: nn.Module,
    sites: Sequence[Site],
    found: Narrow,
    specs: Sequence[TensorSpec],
    init: Start,
    seed: int,
) -> Plan:
    widths = found.widths
    shared = shared_by(model, sites, widths.resizes)
    layers = []
    for site in sites:
        target = widths.targets[site.name]
        same = all(before == after for before, after in (target.inputs, target.outputs))
        layers.append(
            LayerPlan(
                name=site.name,
                aliases=site.aliases,
                kind=site.kind.name,
                action="kept" if same else "widened",
                reason=target.reason or "pruned by the norm of its weights",
                inputs=target.inputs,
                outputs=target.outputs,
                init=init,
                params=(sum(p.numel() for p in site.held.parameters()), 0),
                shared=shared[site.name],
            )
        )
    plan = Plan(
        model=f"{type(model).__module__}.{type(model).__qualname__}",
        fingerprint=fingerprint(model),
        settings=Settings(inputs=tuple(specs), init=init, seed=seed),
        inputs=tuple(specs),
        layers=tuple(layers),
        others=others_of(model, sites, widths.resizes),
        resizes=widths.resizes,
        attrs=widths.attrs,
        params=count_params(model),
        bytes=count_bytes(model),
        notes=(f"pruned: {100 * found.share:.1f} % of each free layer's outputs are kept",),
    )
    args, kwargs = make_inputs(model, specs, batch=1)
    seen = observe(model, [site.name for site in sites], args, kwargs)
    return with_counts(model, plan, seen)


def _kept(sites: Sequence[Site], found: Narrow) -> dict[str, Tensor]:
    """Return, for each layer that becomes narrower, the outputs that it keeps."""
    norms: dict[str, Tensor] = {}
    for site in sites:
        group = found.groups.get(site.name)
        own = None if group is None else site.kind.output_norms(site.module)
        if group is not None and own is not None:
            norms[group] = norms[group] + own if group in norms else own
    kept = {}
    for name, group in found.groups.items():
        count = found.widths.targets[name].outputs[1]
        if group in norms and len(norms[group]) >= count:
            kept[name] = norms[group].topk(count).indices.sort().values
    return kept
