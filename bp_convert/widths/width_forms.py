"""How the tensors and attributes of modules that no kind speaks for depend on their widths.

A form answers for a module: which widths are its own, along which axes of its input the others
lie, and which tensors and attributes follow from both. Kinds tell those of their own types, and
of those alike; modules of types that nothing is known of are described axis by axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from bp_convert.kinds import relative_of
from bp_convert.kinds.shapes import Form, Sizes
from bp_convert.kinds.turned_kind import turned_form
from bp_convert.torch_private import BatchNormBase, buffers_of, parameters_of


def form_of(module: nn.Module) -> Form | None:
    """Return the form of a module of a known type, or None."""
    kind = relative_of(module)
    make = kind.form if kind is not None else _other(module)
    form = None if make is None else make(module)
    return form if form is not None and _fits(module, form) else None


def is_turned(module: nn.Module) -> bool:
    """Return whether a module is transformers' Conv1D, a linear layer whose weight is (D, K)."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _other(module: nn.Module) -> Callable[[Any], Form] | None:
    """Return what makes the form of a module that is of no kind's types."""
    if is_turned(module):
        return lambda one: turned_form(one, type(one))
    return next((make for types, make in _FORMS if isinstance(module, types)), None)


def _fits(module: nn.Module, form: Form) -> bool:
    """Check that the form says the shapes that the module really has."""
    said = form.told().tensors
    held = {**parameters_of(module), **buffers_of(module)}
    return all(
        name in said and tuple(tensor.shape) == said[name]
        for name, tensor in held.items()
        if tensor is not None
    )


def _channel_norm(axis: int, base: type[nn.Module], attr: str, names: Sequence[str]) -> Any:
    def make(m: Any) -> Form:
        return Form(
            own={},
            inputs=((axis, getattr(m, attr)),),
            sizes=lambda own, inp: Sizes(
                {**dict.fromkeys(names, (inp[0],)), "num_batches_tracked": ()}, {attr: inp[0]}
            ),
            base=base,
        )

    return make


def _layer_norm(m: Any) -> Form:
    shape = tuple(m.normalized_shape)
    return Form(
        own={},
        inputs=tuple((i - len(shape), width) for i, width in enumerate(shape)),
        sizes=lambda own, inp: Sizes(
            {"weight": tuple(inp), "bias": tuple(inp)}, {"normalized_shape": tuple(inp)}
        ),
        base=nn.LayerNorm if isinstance(m, nn.LayerNorm) else nn.RMSNorm,
    )


def _prelu(m: Any) -> Form:
    count = m.num_parameters
    return Form(
        own={},
        inputs=((1, count),) if count > 1 else (),
        sizes=lambda own, inp: Sizes(
            {"weight": tuple(inp) or (1,)}, {"num_parameters": inp[0]} if inp else {}
        ),
        base=nn.PReLU,
    )


_STATISTICS = ("weight", "bias", "running_mean", "running_var")
_BATCH = BatchNormBase
_INSTANCE: tuple[tuple[type[nn.Module], int], ...] = (
    (nn.InstanceNorm1d, -2),
    (nn.InstanceNorm2d, -3),
    (nn.InstanceNorm3d, -4),
)
_FORMS: tuple[tuple[type[nn.Module] | tuple[type[nn.Module], ...], Any], ...] = (
    (_BATCH, _channel_norm(1, _BATCH, "num_features", _STATISTICS)),
    *((t, _channel_norm(axis, t, "num_features", _STATISTICS)) for t, axis in _INSTANCE),
    ((nn.LayerNorm, nn.RMSNorm), _layer_norm),
    (nn.GroupNorm, _channel_norm(1, nn.GroupNorm, "num_channels", ("weight", "bias"))),
    (nn.PReLU, _prelu),
)
