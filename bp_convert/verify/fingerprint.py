"""Whether a model is still the same to the bit."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bp_convert.errors import VerificationError
from bp_convert.graph.clone import all_tensors
from bp_convert.torch_private import hash_of, version_of

Fingerprint = tuple[tuple[int, int, int], ...]


def fingerprint_of_data(model: nn.Module) -> Fingerprint:
    """Note every tensor's identity, version and bits; equal notes mean that nothing was written."""
    return tuple((id(one), _version(one), _bits(one)) for one in all_tensors(model))


def check_untouched(source: nn.Module, before: Fingerprint) -> None:
    """Check that the model is as it was when ``before`` was noted.

    Raises:
        VerificationError: it was written to.
    """
    if fingerprint_of_data(source) != before:
        raise VerificationError(
            where=type(source).__name__,
            found="the source model's tensors changed during conversion",
            allowed="a source that stays bit-identical",
            fix="look for a forward that writes to tensors which copies share, such as those of a "
            "class or of a Python module",
        )


def _version(tensor: Tensor) -> int:
    return 0 if is_lazy(tensor) or tensor.is_inference() else version_of(tensor)


def _bits(tensor: Tensor) -> int:
    """Hash a tensor's bytes, whatever its dtype."""
    if is_lazy(tensor) or tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return 0
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    return hash_of(tensor.detach().contiguous().view(-1))
