"""A model in plain int8 beside its conversion: what rounding alone gives for as few bytes."""

from __future__ import annotations

import torch
from torch import nn

from bp_convert.bits.grid import FORMS, form_of, nbytes
from bp_convert.errors import TraceError
from bp_convert.graph.clone import clone
from bp_convert.graph.example import SampleInputs
from bp_convert.values.plan import Plan
from bp_convert.values.report import PlainBits
from bp_convert.verify.check import MANY, wide
from bp_convert.verify.compare import change
from bp_convert.verify.pair import in_dtype
from bp_convert.verify.way import Way

STORE = "int8"


@torch.no_grad()
def in_plain_bits(source: nn.Module, plan: Plan, sample: SampleInputs) -> PlainBits | None:
    """Return the bytes of a model in plain int8 and the error of its outputs, as ``verify``
    measures a conversion's; None where it takes more bytes than the plan, which then needs no
    comparison, where the plan keeps to no target, and where the model does not run.

    Args:
        source: the model, which is left as it is.
        plan: a conversion that stores no layer in few bits.
        sample: example inputs.
    """
    if plan.stored or plan.resizes or not plan.converted or not plan.settings.target:
        return None
    if FORMS[STORE].bits >= 8 * min((p.element_size() for p in source.parameters()), default=1):
        return None
    held = {id(one): one for one in [*source.parameters(), *source.buffers()]}
    weights = {id(one) for one in source.parameters()}
    size = sum(nbytes(STORE if key in weights else None, one) for key, one in held.items())
    if size > plan.bytes.after:
        return None
    copy = in_dtype(clone(source, apart=True), wide(source))
    way = Way("eval mode", sample.batch(copy, MANY if sample.real else 1))
    try:
        was = way.call(copy)
        for one in copy.parameters():
            form = form_of(STORE, one)
            if form is not None:
                one.copy_(form.rounded(one))
        error = change(was, way.call(copy)).error
    except TraceError:
        return None
    return None if error is None else PlainBits(bytes=size, output_error=error)
