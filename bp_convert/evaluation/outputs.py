"""What a model puts out on a batch, and the tensor of it that counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.calibration.tap import token_mask
from bp_convert.errors import DataError
from bp_convert.graph.example import adapt
from bp_convert.graph.running import Args, Kwargs, inference, run
from bp_convert.graph.tree import rows_in, tensors_in


def forward(model: nn.Module, args: Args, kwargs: Kwargs, number: int = 0) -> Any:
    """Run a model on a copy of a batch, in eval mode and without gradients.

    Args:
        number: of the batch, from which random numbers start, so that all models draw the same.

    Raises:
        TraceError: it does not run on the batch.
    """
    with inference(model, number):
        return run(model, *adapt(model, args, kwargs))


def main_output(raw: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """Return ``live_output`` on the CPU and without its graph.

    Raises:
        DataError: there is none, its first axis is not the batch, or it holds NaN.
    """
    found = live_output(raw, args, kwargs)
    if bool(torch.isnan(found).any()):
        raise _no_output("outputs that are NaN")
    return found.detach().cpu()


def live_output(raw: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """Return the tensor that counts: logits, else last_hidden_state, else the first floating one.

    Args:
        raw: what the model returned.
        args, kwargs: the batch that it ran on.

    Returns:
        (N, ...), where it is and with its graph.

    Raises:
        DataError: there is none, or its first axis is not the batch.
    """
    named = (
        raw.get(name) if isinstance(raw, Mapping) else getattr(raw, name, None)
        for name in ("logits", "last_hidden_state")
    )
    floats = (one for one in tensors_in(raw) if one.is_floating_point())
    found = next((one for one in (*named, *floats) if isinstance(one, Tensor)), None)
    rows = rows_in((args, kwargs))
    if found is None:
        raise _no_output(f"a {type(raw).__name__} without floating-point numbers")
    if found.dim() == 0 or found.shape[0] != rows:
        raise _no_output(f"outputs of shape {tuple(found.shape)} for {rows} examples")
    return found


def _no_output(problem: str) -> DataError:
    return unusable(
        problem,
        "floating-point outputs with the examples on their first axis",
        "look at what the model's forward returns on these examples",
    )


@dataclass(frozen=True)
class Seen:
    """One batch as a metric sees it.

    Attributes:
        raw: what the model returned.
        args, kwargs: the inputs.
        labels: labels of the batch, or None.
        reference: the source's outputs, where the metric compares with them.
    """

    raw: Any
    args: Args
    kwargs: Kwargs
    labels: Tensor | None = None
    reference: Tensor | None = None

    @cached_property
    def outputs(self) -> Tensor:
        """(N, ...), the tensor of ``raw`` that counts."""
        return main_output(self.raw, self.args, self.kwargs)

    @property
    def mask(self) -> Tensor | None:
        """(N, T) booleans, which tokens count; None where nothing tells."""
        return token_mask((self.args, self.kwargs))


def token_ids(args: Args, kwargs: Kwargs) -> Tensor | None:
    """Return the token ids among the inputs: the first that are integers (N, T)."""
    named = {"input_ids": kwargs.get("input_ids"), **kwargs}
    named.pop("attention_mask", None)
    for one in [*named.values(), *args]:
        if isinstance(one, Tensor) and one.dim() == 2 and not one.is_floating_point():
            return one
    return None


def unusable(found: str, allowed: str, fix: str) -> DataError:
    """Return the error of outputs or labels that a metric cannot use."""
    return DataError(where="evaluation", found=found, allowed=allowed, fix=fix)
