"""What stands for a layer that computes its weight, or has a forward of its own: the plain layer of
the weight that it has in effect.

Found by asking a copy, never by knowing a class; ``probing`` then says whether it is true.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.overrides import TorchFunctionMode

from bp_convert.fields.carry import blank, fields_of
from bp_convert.graph.beside import COMPUTING
from bp_convert.graph.clone import clone
from bp_convert.graph.probing import differs, draw, near
from bp_convert.graph.running import draws_kept, evaluating
from bp_convert.kinds import Kind
from bp_convert.torch_private import ConvBase, hooks_of

WORDS = {
    **{"_WeightNorm": "weight norm", "WeightNorm": "weight norm"},
    **{"_SpectralNorm": "spectral norm", "SpectralNorm": "spectral norm"},
    **{"_Orthogonal": "kept orthogonal", "PruningContainer": "pruned"},
}
APPLY = (
    *(F.linear, F.conv1d, F.conv2d, F.conv3d),
    *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
)


@dataclass(frozen=True)
class Standing:
    """What stands for a layer.

    Attributes:
        layer: the plain layer, or the layer itself where it is plain or nothing stands for it.
        note: what the plan says of it; empty for a plain layer.
        computed: how its weight is computed; empty where it is its own.
        trouble: why nothing stands for it.
    """

    layer: nn.Module
    note: str = ""
    computed: str = ""
    trouble: str = ""


def is_plain(kind: Kind, layer: nn.Module) -> bool:
    """Return whether a layer computes what its kind says with the weight that it holds."""
    return kind.matches(layer) and not computed_by(layer)


def computed_by(layer: nn.Module) -> str:
    """Say what computes a layer's weight anew before or at each call; empty where nothing does."""
    found = []
    if parametrize.is_parametrized(layer):
        held: Any = layer.parametrizations
        for name, steps in held.items():
            words = ", ".join(_words(one) for one in steps)
            found.append(words if name == "weight" else f"{name}: {words}")
    found += [_words(hook) for hook in hooks_of(layer)[0].values() if isinstance(hook, COMPUTING)]
    return "; ".join(dict.fromkeys(found))


def outline(kind: Kind, layer: nn.Module) -> nn.Module:
    """Return the plain layer of a layer's fields on the meta device; itself where it is plain, or
    none can be tried."""
    if not kind.probed or is_plain(kind, layer):
        return layer
    like = next(layer.parameters()).to("meta")
    return _as_trained(blank(kind.dense, fields_of(layer, kind.fields), like), layer)


def standing(kind: Kind, layer: nn.Module) -> Standing:
    """Find what stands for a layer, which is left as it is."""
    if is_plain(kind, layer):
        return Standing(layer)
    name, base = type(layer).__name__, _base(kind)
    if any(one.is_meta for one in layer.parameters()):
        return Standing(layer, trouble="its weight is computed, and it holds no values to see how")
    if not kind.probed:
        computed = computed_by(layer)
        return Standing(layer, trouble=f"what it computes with is computed itself ({computed})")
    try:
        with draws_kept(layer):
            if kind.matches(layer):
                return _of_computed(kind, layer, computed_by(layer))
            own = taken(kind, layer)
            try:
                alike = near(kind, layer, own)
            except Exception as problem:  # of the user's code, on inputs that it does not expect
                said = f"the forward of {name} does not run on what {base} takes (probed:"
                return Standing(layer, trouble=f"{said} {type(problem).__name__})")
            if alike and _same_tensors(layer, own):
                return Standing(layer, f"subclass {name}, computes as {base} (probed)")
            other = own if alike else _other_weight(kind, layer)
    except Exception as problem:  # of the user's code
        said = f"{type(problem).__name__}: {problem}".splitlines()[0][:120]
        return Standing(layer, trouble=f"its weight in effect cannot be read: {said}")
    if other is None:
        return Standing(layer, trouble=f"{name} does not compute what {base} computes (probed)")
    note = f"subclass {name}, computes as {base} of another weight (probed): that is factored, the"
    return Standing(other, f"{note} computation dropped", f"in the forward of {name}")


def disproved(kind: Kind, layer: nn.Module, found: Standing) -> str:
    """Say why what stands for a layer does not; it is tried in every way. Empty where it does."""
    if found.trouble or is_plain(kind, layer):
        return found.trouble
    own = not kind.matches(layer)  # what hooks and parametrisations do in train mode is dropped
    plain = taken(kind, layer) if found.layer is layer else found.layer
    try:
        said = differs(kind, layer, plain, training=own, exact=found.layer is layer)
    except Exception as problem:  # of the user's code
        said = f"{type(problem).__name__}: {problem}".splitlines()[0][:120]
    what = type(layer).__name__ if own else f"its weight in effect ({found.computed})"
    return f"{what} is not {_base(kind)} (probed): {said}" if said else ""


def _base(kind: Kind) -> str:
    base = kind.dense.__name__
    return f"nn.{base}" if getattr(nn, base, None) is kind.dense else base


def _words(thing: object) -> str:
    if isinstance(thing, BasePruningMethod):
        return "pruned"
    name = type(thing).__name__
    return WORDS.get(name, name)


# The weight that a layer has in effect


def _of_computed(kind: Kind, layer: nn.Module, computed: str) -> Standing:
    """Read the tensors that a layer computes in eval mode."""
    found, again = taken(kind, layer), taken(kind, layer)
    both = zip(found.parameters(), again.parameters(), strict=True)
    if any(not torch.equal(one, two) for one, two in both):
        return Standing(layer, trouble=f"its weight ({computed}) is another at each call")
    note = f"{computed}: its weight in eval mode is factored, the computation dropped"
    return Standing(found, note, computed)


@torch.no_grad()
def taken(kind: Kind, layer: nn.Module) -> nn.Module:
    """Return the plain layer of the tensors that a copy of a layer shows in eval mode."""
    copy: Any = evaluating(clone(layer, apart=True))
    for hook in hooks_of(copy)[0].values():
        if isinstance(hook, COMPUTING):
            hook(copy, ())
    made = _empty(kind, layer)
    for name, parameter in made.named_parameters():
        parameter.copy_(_shaped(getattr(copy, name), parameter))
    return made


@torch.no_grad()
def _other_weight(kind: Kind, layer: nn.Module) -> nn.Module | None:
    """Return the plain layer that computes what a subclass computes; None where none is found."""
    copy = evaluating(clone(layer, apart=True))
    for weight, bias in _candidates(kind, copy):
        made = _empty(kind, layer)
        held: Any = made
        if (getattr(made, "bias", None) is None) != (bias is None):
            continue
        with suppress(RuntimeError):  # of another shape
            held.weight.copy_(weight)
            if bias is not None:
                held.bias.copy_(bias)
            if near(kind, layer, made):
                return made
    return None


def _candidates(kind: Kind, copy: Any) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield weights and biases that a copy may compute with."""
    if kind.lookup:
        rows = torch.arange(copy.num_embeddings, device=copy.weight.device)
        yield copy(rows), None
        return
    if not isinstance(copy, nn.Linear | ConvBase):
        return
    x = draw(kind, copy)[0]
    constant = copy(torch.zeros_like(x))
    across = tuple(a for a in range(constant.dim()) if a != 1) if constant.dim() > 2 else (0,)
    bias = None if copy.bias is None else constant.mean(across)
    with _Caught() as caught:
        y = copy(x)
    for weight in caught.weights:
        yield weight, bias
        # What it computes may be scaled after the product, each output by its own number.
        made: Any = _empty(kind, copy)
        if weight.shape == made.weight.shape:
            made.weight.copy_(weight)
            if bias is not None:
                made.bias.zero_()
            moved, given = y - constant, made(x)
            if moved.shape == given.shape:
                scale = (moved * given).sum(across) / given.square().sum(across).clamp(min=1e-30)
                shape = [1] * weight.dim()
                shape[1 if getattr(copy, "transposed", False) else 0] = -1
                yield weight * scale.view(shape), bias
    if isinstance(copy, nn.Linear):
        units = torch.eye(copy.in_features, dtype=x.dtype, device=x.device)
        yield (copy(units) - copy(torch.zeros_like(units))).t(), bias


class _Caught(TorchFunctionMode):
    """Notes the weights that linear maps and convolutions are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in APPLY:
            weight = args[1] if len(args) > 1 else (kwargs or {}).get("weight")
            if isinstance(weight, Tensor):
                self.weights.append(weight.detach().clone())
        return func(*args, **(kwargs or {}))


def _same_tensors(layer: nn.Module, plain: nn.Module) -> bool:
    """Return whether a layer holds the tensors of the plain one, which a change to eval mode may
    have set."""
    held = dict(layer.named_parameters())
    both = ((held.get(name), one) for name, one in plain.named_parameters())
    return all(mine is not None and torch.equal(mine, one) for mine, one in both)


# The plain layer


def _empty(kind: Kind, layer: nn.Module) -> nn.Module:
    """Return a plain layer of a layer's fields whose values are not set."""
    like = next(layer.parameters())
    return _as_trained(blank(kind.dense, fields_of(layer, kind.fields), like), layer)


def _as_trained(made: nn.Module, layer: nn.Module) -> nn.Module:
    """Train of a plain layer what is trained of the one it stands for."""
    held = [(name, one.requires_grad) for name, one in layer.named_parameters()]
    for name, parameter in made.named_parameters():
        bias = name.startswith("bias")
        trained = [flag for other, flag in held if ("bias" in other) == bias]
        parameter.requires_grad_(any(trained) or not trained)
    return made.train(layer.training)


def _shaped(value: Any, like: Tensor) -> Tensor:
    if not isinstance(value, Tensor) or value.shape != like.shape:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"it is {shape} where {tuple(like.shape)} is due")
    return value
