"""All layers of a converted model set to the way that is asked for, at once."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal, get_args

from torch import nn

from bp_convert.errors import BpConvertError, PlanError
from bp_convert.graph.clone import clone_to_meta
from bp_convert.graph.example import SampleInputs
from bp_convert.graph.observe import Observation, observe
from bp_convert.graph.stacks import layer_at
from bp_convert.graph.tree import rows_in
from bp_convert.kinds import kind_of, predict
from bp_convert.storage import plan_of, to_dense
from bp_convert.values.plan import Plan, Way

Pace = Literal["fast", "small", "planned"]


def run_as(model: nn.Module, pace: Pace) -> nn.Module:
    """Set how all layers of a converted model run in eval mode without gradients; return the model.

    It is changed in place, its plan is not: a saved model runs as planned when it is loaded again.

    Args:
        pace: ``small``, all on their factors, with the least memory; ``fast``, each on the way that
            is predicted to be faster on one example of the plan's inputs, which takes up to the
            dense layers' memory besides; ``planned``, as its plan says.

    Raises:
        CheckpointError: the model carries no plan.
        PlanError: another word.
    """
    if pace not in get_args(Pace):
        raise PlanError(
            where="run_as",
            found=repr(pace),
            allowed="fast, small or planned",
            fix="give one of these",
        )
    plan = plan_of(model)
    ways = _faster(model, plan) if pace == "fast" else {}
    for layer in plan.converted:
        twin = layer_at(model, layer.name)
        if getattr(twin, "EXPANDS", False):
            way: Way = "factored" if pace == "small" else ways.get(layer.name, layer.way)
            twin.way = way  # type: ignore[assignment]
            twin.train(twin.training)  # which drops what is kept
    return model


def _faster(model: nn.Module, plan: Plan) -> dict[str, Way]:
    """Return the faster way of each layer by name, where something is known of its calls."""
    dense, seen = _observed(model, plan)
    found: dict[str, Way] = {}
    for layer in plan.converted if seen is not None else ():
        if layer.way == "fused":  # was measured where the plan was made
            continue
        module = layer_at(dense, layer.name)
        kind = kind_of(module)
        shapes = seen.calls((layer.name, *layer.aliases)) if seen is not None else []
        if kind is not None:
            speed = predict(kind, module, layer.after, dict(layer.factors), shapes)
            if speed is not None:
                found[layer.name] = speed.way()
    return found


def _observed(model: nn.Module, plan: Plan) -> tuple[nn.Module, Observation | None]:
    """Return the model in plain layers and what a run of it shows; on shapes alone where that
    does."""
    sample = SampleInputs(plan.inputs)
    names = [layer.name for layer in plan.layers]
    for on_shapes in (True, False) if sample else ():
        with suppress(BpConvertError):
            dense = to_dense(clone_to_meta(model) if on_shapes else model)
            args, kwargs = sample.batch(dense, 1, device="cpu")
            rows = max(1, rows_in((args, kwargs)))
            return dense, observe(dense, names, args, kwargs, examples=rows)
    return model, None
