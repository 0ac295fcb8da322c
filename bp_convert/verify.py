"""A converted model checked by running it, never by reasoning about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.errors import VerificationError
from bp_convert.graph.clone import all_tensors, clone
from bp_convert.graph.observe import Args, Kwargs, describe, quiet_forward, run, tensors_in
from bp_convert.values.report import Verification

Fingerprint = tuple[tuple[int, int, int], ...]


def fingerprint_of_data(model: nn.Module) -> Fingerprint:
    """Note every tensor's identity, version and bits; equal notes mean that nothing was written."""
    return tuple((id(one), _version(one), _bits(one)) for one in all_tensors(model))


def verify(
    source: nn.Module,
    converted: nn.Module,
    args: Args,
    kwargs: Kwargs,
    *,
    new: Sequence[str],
    before: Fingerprint,
) -> Verification:
    """Run source and converted model on the same input and compare.

    Args:
        args: positional inputs, a batch of at least two.
        kwargs: keyword inputs.
        new: parameters that conversion made; each must receive a gradient.
        before: ``fingerprint_of_data(source)`` from before the conversion.

    Raises:
        VerificationError: it does not run, an output changed its shape, a parameter gets no
            gradient, or the source was written to.
    """
    notes: list[str] = []
    with torch.random.fork_rng(devices=[]), quiet_forward():
        torch.manual_seed(0)
        error = _compare_eval(source, converted, args, kwargs)
        ran_train, gradients = _train_step(source, converted, args, kwargs, new, notes)
    if fingerprint_of_data(source) != before:
        raise VerificationError(
            where=type(source).__name__,
            found="the source model's tensors changed during conversion",
            allowed="a source that stays bit-identical",
            fix="look for a forward that writes to its own weights in eval mode",
        )
    return Verification(
        ran_eval=True,
        ran_train=ran_train,
        gradients=gradients,
        source_untouched=True,
        output_error=error,
        notes=tuple(notes),
    )


def _compare_eval(source: nn.Module, converted: nn.Module, args: Args, kwargs: Kwargs) -> float:
    """Compare the outputs in eval mode; return their relative Frobenius difference."""
    with _mode(source, training=False), _mode(converted, training=False), torch.no_grad():
        expected = run(source, args, kwargs)
        try:
            got = converted(*args, **kwargs)
        except Exception as problem:
            raise _failed("eval", problem) from problem
    _same_form(expected, got, "eval")
    top = bottom = 0.0
    for old, new in zip(tensors_in(expected), tensors_in(got), strict=True):
        if old.is_floating_point():
            top += float((new.double() - old.double()).square().sum())
            bottom += float(old.double().square().sum())
    gap: float = (top / bottom) ** 0.5 if bottom else top**0.5
    return gap


def _train_step(
    source: nn.Module,
    converted: nn.Module,
    args: Args,
    kwargs: Kwargs,
    new: Sequence[str],
    notes: list[str],
) -> tuple[bool, bool]:
    """Run forward and backward in train mode on the converted model, and undo every trace."""
    with _mode(converted, training=True), _kept_buffers(converted), torch.enable_grad():
        try:
            leaves = [t for t in tensors_in(converted(*args, **kwargs)) if t.requires_grad]
        except Exception as problem:
            if _source_trains(source, args, kwargs):
                raise _failed("train", problem) from problem
            notes.append("train mode not checked: the source does not run in it on this input")
            return False, False
        frozen = [
            n for n, p in converted.named_parameters() if n in set(new) and not p.requires_grad
        ]
        if not leaves:
            notes.append("gradients not checked: no output asks for any")
            return True, False
        loss = torch.stack([(t * torch.rand_like(t)).sum().float() for t in leaves]).sum()
        try:
            torch.autograd.backward(loss)
            named = dict(converted.named_parameters())
            without = [n for n in new if named[n].grad is None and n not in frozen]
        finally:
            converted.zero_grad(set_to_none=True)
    if frozen:
        notes.append(f"{len(frozen)} new parameters are frozen, as in the source")
    if without:
        raise VerificationError(
            where=without[0],
            found=f"{len(without)} new parameters receive no gradient",
            allowed="a gradient for every new parameter",
            fix="keep these layers with --exclude, or run the model on an input that uses them",
        )
    return True, True


def _source_trains(source: nn.Module, args: Args, kwargs: Kwargs) -> bool:
    trial = clone(source).train()
    try:
        trial(*args, **kwargs)
    except Exception:
        return False
    return True


def _same_form(expected: Any, got: Any, mode: str) -> None:
    old, new = tensors_in(expected), tensors_in(got)
    forms = [[describe(t) for t in one] for one in (old, new)]
    if type(expected) is not type(got) or forms[0] != forms[1]:
        raise VerificationError(
            where=f"the converted model in {mode} mode",
            found=f"{type(got).__name__} of {', '.join(forms[1])}",
            allowed=f"{type(expected).__name__} of {', '.join(forms[0])}, as the source",
            fix="report this model; meanwhile keep layers with --exclude, or use alpha 1",
        )


def _failed(mode: str, problem: Exception) -> VerificationError:
    text = str(problem).strip().splitlines()
    return VerificationError(
        where=f"the converted model in {mode} mode",
        found=f"{type(problem).__name__}: {text[0] if text else 'no message'}",
        allowed="a forward that runs as the source's does",
        fix="keep the layers named in the message with --exclude, or use alpha 1",
    )


@contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Switch every module's training flag and put each back as it was."""
    flags = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag


@contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[None]:
    """Put running statistics back as they were."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _bits(tensor: Tensor) -> int:
    """Hash a tensor's bytes, whatever its dtype."""
    if tensor.is_meta or tensor.numel() == 0:
        return 0
    flat = tensor.detach().contiguous().view(-1)
    return int(torch.hash_tensor(flat.view(torch.uint8) if flat.is_complex() else flat).item())
