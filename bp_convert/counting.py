"""Parameters, multiply-adds and bytes of a plan, counted on the converted model without data."""

from __future__ import annotations

from torch import nn

from bp_convert.errors import VerificationError
from bp_convert.graph.clone import clone_to_meta
from bp_convert.graph.example import make_inputs
from bp_convert.graph.observe import observe
from bp_convert.kinds import kind_of
from bp_convert.surgery import apply_plan
from bp_convert.values.plan import LayerPlan, Plan, Totals


def with_counts(
    model: nn.Module, plan: Plan, macs_before: int | None, *, edited: bool = False
) -> Plan:
    """Return ``plan`` with totals counted on the converted model, made without any data.

    Args:
        macs_before: multiply-adds of the source; None where they cannot be counted.
        edited: take the numbers of replaced layers from the count as well; else they are
            predictions, which the count must confirm.

    Raises:
        VerificationError: a prediction differs from the count.
    """
    ghost = apply_plan(clone_to_meta(model), plan, structure_only=True).model
    macs = None
    counted: dict[str, int] | None = None
    if macs_before is not None:
        args, kwargs = make_inputs(ghost, plan.inputs, batch=1)
        seen = observe(ghost, _watched(ghost, plan), args, kwargs)
        macs = Totals(before=macs_before, after=seen.total_macs)
        counted = seen.macs
    layers = []
    for layer in plan.layers:
        module = ghost.get_submodule(layer.name)
        found = None if counted is None else counted.get(layer.name, 0)
        if layer.action != "replaced":
            layers.append(_settled(layer, module, found or 0))
        elif edited:
            layers.append(_recounted(layer, module, found))
        else:
            _confirm(layer, module, found)
            layers.append(layer)
    return plan.model_copy(
        update={
            "layers": tuple(layers),
            "params": Totals(before=plan.params.before, after=count_params(ghost).after),
            "bytes": Totals(before=plan.bytes.before, after=count_bytes(ghost).after),
            "macs": macs,
        }
    )


def recount(model: nn.Module, plan: Plan) -> Plan:
    """Return a plan that a person may have edited with its numbers derived anew.

    Raises:
        PlanError: the plan does not fit the model, or was edited into something impossible.
    """
    return with_counts(model, plan, None if plan.macs is None else plan.macs.before, edited=True)


def _recounted(layer: LayerPlan, module: nn.Module, macs: int | None) -> LayerPlan:
    params = sum(p.numel() for p in module.parameters())
    return layer.model_copy(
        update={"params": (layer.params[0], params), "macs": (layer.macs[0], macs or 0)}
    )


def _confirm(layer: LayerPlan, module: nn.Module, macs: int | None) -> None:
    params = sum(p.numel() for p in module.parameters())
    for what, told, found in (
        ("parameters", layer.params[1], params),
        ("multiply-adds", layer.macs[1], macs),
    ):
        if found is not None and told != found:
            raise VerificationError(
                where=f"{layer.name} ({layer.kind})",
                found=f"{found} {what} counted",
                allowed=f"{told}, as predicted",
                fix="please report this fault of bp-convert; meanwhile --exclude the layer",
            )


def _settled(layer: LayerPlan, module: nn.Module, macs: int) -> LayerPlan:
    """Return the plan of a layer that stays dense, with what it has become."""
    kind = kind_of(module)
    assert kind is not None
    inputs, outputs = kind.widths(module)
    params = sum(p.numel() for p in module.parameters())
    return layer.model_copy(
        update={
            "action": "kept" if params == layer.params[0] else "widened",
            "inputs": (layer.inputs[0], inputs),
            "outputs": (layer.outputs[0], outputs),
            "params": (layer.params[0], params),
            "macs": (layer.macs[0], macs),
        }
    )


def _watched(model: nn.Module, plan: Plan) -> dict[str, nn.Module]:
    return {layer.name: model.get_submodule(layer.name) for layer in plan.layers}


def count_params(model: nn.Module) -> Totals:
    """Count unique parameters."""
    count = sum(p.numel() for p in model.parameters())
    return Totals(before=count, after=count)


def count_bytes(model: nn.Module) -> Totals:
    """Count the bytes of unique parameters and buffers, as saved."""
    held = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    size = sum(t.numel() * t.element_size() for t in held.values())
    return Totals(before=size, after=size)


def check_counts(model: nn.Module, plan: Plan) -> None:
    """Compare a plan's numbers with those of the model that was made by it.

    Raises:
        VerificationError: they differ.
    """
    for layer in plan.layers:
        found = sum(p.numel() for p in model.get_submodule(layer.name).parameters())
        if found != layer.params[1]:
            raise _miscounted(layer.name, found, layer.params[1])
    total = count_params(model).after
    if total != plan.params.after:
        raise _miscounted("the whole model", total, plan.params.after)


def _miscounted(where: str, found: int, planned: int) -> VerificationError:
    return VerificationError(
        where=where,
        found=f"{found} parameters",
        allowed=f"{planned}, as planned",
        fix="plan again; if the plan is fresh, please report this model",
    )
