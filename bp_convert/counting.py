"""Parameters, multiply-adds and bytes of a plan, counted on the converted model without data."""

from __future__ import annotations

from contextlib import suppress

from torch import nn

from bp_convert.bits.stored import stored_bytes
from bp_convert.errors import TraceError
from bp_convert.graph.clone import clone_to_meta
from bp_convert.graph.example import SampleInputs
from bp_convert.graph.observe import Observation, observe, observe_shapes
from bp_convert.graph.stacks import layer_at
from bp_convert.graph.tree import rows_in
from bp_convert.kinds import kind_of
from bp_convert.surgery import apply_plan, check
from bp_convert.values.plan import LayerPlan, Plan, Totals

ON_DATA = "the model looks at its data: multiply-adds are those of the path that one example takes"
ESTIMATED = "the widened model does not run without data: its multiply-adds are an estimate"


def with_counts(
    model: nn.Module,
    plan: Plan,
    seen: Observation | None,
    *,
    sample: SampleInputs | None = None,
    edited: bool = False,
) -> Plan:
    """Return ``plan`` with totals counted on the converted model, made without any data.

    Where no width changes, multiply-adds are those of the source's run, less what its layers took,
    plus what the kinds predict of their twins on the same calls. A widened model is run on shapes
    alone and counted; where it looks at its data, the same sum is an estimate.

    Args:
        seen: the source's run; None where it was not run.
        sample: example inputs; None draws them from the plan's description.
        edited: the plan may have been edited: its numbers are derived anew.
    """
    empty = apply_plan(clone_to_meta(model), plan, structure_only=True, checked=True).model
    counted = (
        None if seen is None else _counted(empty, plan, seen, sample or SampleInputs(plan.inputs))
    )
    notes = dict.fromkeys(plan.notes)
    if seen is not None and seen.on_data:
        notes[ON_DATA] = None
    elif seen is not None and counted is None and plan.resizes:
        notes[ESTIMATED] = None
    layers = []
    held: set[int] = set()  # parameters of the layers before
    sharing = any(layer.shares for layer in plan.layers)
    for layer in plan.layers:
        replaced = layer.action == "replaced"
        if layer.way == "expanded":
            macs = layer.dense_macs
        elif counted is not None:
            macs = counted.macs.get(layer.name, 0)
        elif edited and seen is not None and replaced:
            macs = _predicted(model, layer, seen)
        else:
            macs = layer.macs[1] if replaced else layer.macs[0]
        module = layer_at(empty, layer.name)
        made = _settled(layer, module, macs, edited=edited)
        if sharing:
            own = {id(one): one.numel() for one in module.parameters()}
            again = sum(count for one, count in own.items() if one in held)
            made = made.model_copy(update={"shared": (layer.shared[0], again)})
            held.update(own)
        layers.append(made)
    total = None
    if seen is not None:
        change = sum(one.macs[1] - one.macs[0] for one in layers)
        after = seen.total_macs + change if counted is None else counted.total_macs
        if counted is not None:  # which runs on the factors
            expanded = [one for one in layers if one.way == "expanded"]
            after += sum(one.macs[1] - counted.macs.get(one.name, 0) for one in expanded)
        total = Totals(before=seen.total_macs, after=max(0, after))
    return plan.model_copy(
        update={
            "layers": tuple(layers),
            "params": Totals(before=plan.params.before, after=count_params(empty).after),
            "bytes": Totals(before=plan.bytes.before, after=stored_bytes(empty, plan)),
            "macs": total,
            "notes": tuple(notes),
        }
    )


def recount(model: nn.Module, plan: Plan, sample: SampleInputs | None = None) -> Plan:
    """Return a plan that a person may have edited with its numbers derived anew.

    Raises:
        PlanError: the plan does not fit the model, or was edited into something impossible.
    """
    check(model, plan)
    seen = None
    sample = sample or SampleInputs(plan.inputs)
    if sample and plan.macs is not None:
        with suppress(TraceError):  # then the old count of multiply-adds is dropped, not kept
            names = [layer.name for layer in plan.layers]
            args, kwargs = sample.batch(model, 1, device="cpu")
            seen = observe(model, names, args, kwargs, examples=max(1, rows_in((args, kwargs))))
    return with_counts(model, plan, seen, sample=sample, edited=True)


def _counted(
    empty: nn.Module, plan: Plan, seen: Observation, sample: SampleInputs
) -> Observation | None:
    """Run a widened model on shapes alone; None where it looks at its data, or is not widened."""
    if seen.on_data or not sample or not plan.resizes:
        return None
    args, kwargs = sample.batch(empty, 1, device="cpu")
    names = [layer.name for layer in plan.layers]
    try:
        return observe_shapes(empty, names, args, kwargs, examples=seen.examples)
    except TraceError:
        return None


def _predicted(model: nn.Module, layer: LayerPlan, seen: Observation) -> int:
    module = layer_at(model, layer.name)
    kind = kind_of(module)
    assert kind is not None
    shapes = seen.calls((layer.name, *layer.aliases))
    return kind.macs(module, layer.after, dict(layer.factors), shapes) // seen.examples


def _settled(layer: LayerPlan, module: nn.Module, macs: int, *, edited: bool) -> LayerPlan:
    """Return the plan of a layer with what it has become. Of a replaced layer a difference to
    what was predicted is noted: one that is called on other shapes than before may cost more."""
    params = sum(p.numel() for p in module.parameters())
    found: dict[str, object] = {
        "params": (layer.params[0], params),
        "macs": (layer.macs[0], macs),
    }
    if layer.action == "replaced":
        if not edited and (layer.params[1], layer.macs[1]) != (params, macs):
            note = f"{macs:,} multiply-adds counted, {layer.macs[1]:,} predicted"
            found["notes"] = (*layer.notes, note)
    else:
        kind = kind_of(module)
        assert kind is not None
        inputs, outputs = kind.widths(module)
        found["action"] = "kept" if params == layer.params[0] else "widened"
        found["inputs"] = (layer.inputs[0], inputs)
        found["outputs"] = (layer.outputs[0], outputs)
    return layer.model_copy(update=found)


def count_params(model: nn.Module) -> Totals:
    """Count unique parameters."""
    count = sum(p.numel() for p in model.parameters())
    return Totals(before=count, after=count)


def count_bytes(model: nn.Module) -> Totals:
    """Count the bytes of unique parameters and buffers, as saved."""
    held = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    size = sum(t.numel() * t.element_size() for t in held.values())
    return Totals(before=size, after=size)
