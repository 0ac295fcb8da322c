"""What becomes of few bits where a result is a folder of transformers, or is trained."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from bp_convert.data import Examples
from bp_convert.errors import PlanError
from bp_convert.files.atomic import is_folder
from bp_convert.fitting import round_stored
from bp_convert.hub.marked import mark, text_of
from bp_convert.values.plan import Plan
from bp_convert.values.recipe import Job


def in_folder(job: Job, goal: Path | None, *, layerwise: bool = False) -> Job:
    """Return a job as it can be had where its result is a folder, which holds floating-point
    numbers as the model has them.

    Args:
        layerwise: it is done layer by layer, to a folder.

    Raises:
        PlanError: other bits are asked for.
    """
    if not layerwise and (goal is None or not is_folder(goal)):
        return job
    asked = job.request
    every = [asked.store, *(rule.store for rule in asked.layers)]
    stores = [one for one in every if one not in (None, "fp32")]
    if stores:
        raise PlanError(
            where=f"store {stores[0]}, to a folder of transformers",
            found="bits that transformers would not read",
            allowed="NAME.pt or NAME.safetensors, which hold them; in a folder fp32, or --dtype",
            fix="-o NAME.pt" + (" and --in-memory" if layerwise else ""),
        )
    if not asked.chooses_bits:
        return job
    return job.model_copy(update={"settings": job.settings.model_copy(update={"store": "fp32"})})


def rounded_again(
    model: nn.Module, source: nn.Module, plan: Plan | None, examples: Examples | None
) -> None:
    """Round a converted model that was trained to the bits that its plan stores it in, in place."""
    if plan is None or not plan.stored:
        return
    batches = examples.batches if examples is not None and plan.settings.fits_data else ()
    round_stored(source, model, plan, batches)
    mark(model, text_of(plan))
