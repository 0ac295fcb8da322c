"""How the tensors and attributes of each module type depend on its widths.

A form answers for a module: which widths are its own, along which axes of its input the others
lie, and which tensors and attributes follow from both. Modules of other types are described axis
by axis.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from bp_convert.graph.fake import Dim
from bp_convert.torch_private import BatchNormBase, buffers_of, has_one_width, parameters_of

Shape = tuple[Dim, ...]
Attr = Dim | tuple[Dim, ...]


@dataclass(frozen=True)
class Sizes:
    """The tensors (parameters and buffers) and attributes of one module at some widths."""

    tensors: Mapping[str, Shape] = field(default_factory=dict)
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    output: Dim | None = None


@dataclass(frozen=True)
class Form:
    """One module's widths.

    Attributes:
        own: widths that the module chooses itself, by name.
        inputs: (axis, width) of the input, for widths that its producer chooses.
        sizes: tensors and attributes, from the own widths and those of the input.
        base: the type whose ``forward`` this describes.
    """

    own: Mapping[str, int]
    inputs: tuple[tuple[int, int], ...]
    sizes: Callable[[Mapping[str, Dim], Sequence[Dim]], Sizes]
    base: type[nn.Module]


def form_of(module: nn.Module) -> Form | None:
    """Return the form of a module of a known type, or None."""
    for types, make in _FORMS:
        if isinstance(module, types):
            form = make(module)
            return form if form is not None and _fits(module, form) else None
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        form = _transposed_linear(module)
        return form if _fits(module, form) else None
    return None


def _fits(module: nn.Module, form: Form) -> bool:
    """Check that the form says the shapes that the module really has."""
    said = form.sizes(form.own, [width for _, width in form.inputs]).tensors
    held = {**parameters_of(module), **buffers_of(module)}
    return all(
        name in said and tuple(tensor.shape) == said[name]
        for name, tensor in held.items()
        if tensor is not None
    )


def _linear(m: Any) -> Form:
    return Form(
        own={"out": m.out_features},
        inputs=((-1, m.in_features),),
        sizes=lambda own, inp: Sizes(
            {"weight": (own["out"], inp[0]), "bias": (own["out"],)},
            {"out_features": own["out"], "in_features": inp[0]},
            own["out"],
        ),
        base=nn.Linear,
    )


def _transposed_linear(m: Any) -> Form:
    return Form(
        own={"out": m.weight.shape[1]},
        inputs=((-1, m.weight.shape[0]),),
        sizes=lambda own, inp: Sizes(
            {"weight": (inp[0], own["out"]), "bias": (own["out"],)},
            {"nf": own["out"], **({"nx": inp[0]} if hasattr(m, "nx") else {})},
            own["out"],
        ),
        base=type(m),
    )


def _conv(m: Any) -> Form:
    kernel = tuple(m.kernel_size)
    axis = -1 - len(kernel)
    base = next(t for t in (*_CONVS, *_TRANSPOSED) if isinstance(m, t))

    def sizes(inputs: Dim, outputs: Dim, groups: Dim, thin: Dim, first: Dim) -> Sizes:
        return Sizes(
            {"weight": (first, thin, *kernel), "bias": (outputs,)},
            {"in_channels": inputs, "out_channels": outputs, "groups": groups},
            outputs,
        )

    if m.groups == m.in_channels > 1:  # depthwise: one filter, or a few, a channel
        times = m.out_channels // m.in_channels
        return Form(
            own={},
            inputs=((axis, m.in_channels),),
            sizes=lambda own, inp: (
                sizes(inp[0], inp[0] * times, inp[0], times, inp[0])
                if m.transposed
                else sizes(inp[0], inp[0] * times, inp[0], 1, inp[0] * times)
            ),
            base=base,
        )
    if m.groups > 1:
        g = m.groups
        return Form(
            own={"out": m.out_channels // g, "in": m.in_channels // g},
            inputs=(),
            sizes=lambda own, inp: (
                sizes(own["in"] * g, own["out"] * g, g, own["out"], own["in"] * g)
                if m.transposed
                else sizes(own["in"] * g, own["out"] * g, g, own["in"], own["out"] * g)
            ),
            base=base,
        )
    return Form(
        own={"out": m.out_channels},
        inputs=((axis, m.in_channels),),
        sizes=lambda own, inp: (
            sizes(inp[0], own["out"], 1, own["out"], inp[0])
            if m.transposed
            else sizes(inp[0], own["out"], 1, inp[0], own["out"])
        ),
        base=base,
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


def _embedding(m: Any) -> Form:
    return Form(
        own={"out": m.embedding_dim},
        inputs=(),
        sizes=lambda own, inp: Sizes(
            {"weight": (m.num_embeddings, own["out"])}, {"embedding_dim": own["out"]}, own["out"]
        ),
        base=nn.Embedding if isinstance(m, nn.Embedding) else nn.EmbeddingBag,
    )


def gates(m: nn.Module) -> int:
    """Return how many matrices a recurrent module stacks in one weight."""
    mode = getattr(m, "mode", type(m).__name__)
    return 4 if mode.startswith("LSTM") else 3 if mode.startswith("GRU") else 1


def _recurrent(m: Any) -> Form:
    g, directions = gates(m), 2 if m.bidirectional else 1
    own = {"out": m.hidden_size} | ({"proj": m.proj_size} if m.proj_size else {})

    def sizes(own: Mapping[str, Dim], inp: Sequence[Dim]) -> Sizes:
        hidden = own["out"]
        state = own.get("proj", hidden)
        tensors: dict[str, Shape] = {}
        for name in parameters_of(m):
            layer = int(cast("re.Match[str]", re.search(r"_l(\d+)", name))[1])
            if name.startswith("weight_ih"):
                tensors[name] = (g * hidden, inp[0] if layer == 0 else directions * state)
            elif name.startswith("weight_hh"):
                tensors[name] = (g * hidden, state)
            elif name.startswith("weight_hr"):
                tensors[name] = (state, hidden)
            else:
                tensors[name] = (g * hidden,)
        attrs: dict[str, Attr] = {"input_size": inp[0], "hidden_size": hidden}
        if m.proj_size:
            attrs["proj_size"] = state
        return Sizes(tensors, attrs, hidden)

    base = next((t for t in (nn.LSTM, nn.GRU, nn.RNN) if isinstance(m, t)), nn.RNNBase)
    return Form(own=own, inputs=((-1, m.input_size),), sizes=sizes, base=base)


def _cell(m: Any) -> Form:
    g = gates(m)

    def sizes(own: Mapping[str, Dim], inp: Sequence[Dim]) -> Sizes:
        h = own["out"]
        tensors: dict[str, Shape] = {"weight_ih": (g * h, inp[0]), "weight_hh": (g * h, h)}
        tensors |= {"bias_ih": (g * h,), "bias_hh": (g * h,)}
        return Sizes(tensors, {"input_size": inp[0], "hidden_size": h}, h)

    base = next(t for t in (nn.LSTMCell, nn.GRUCell, nn.RNNCell) if isinstance(m, t))
    return Form({"out": m.hidden_size}, ((-1, m.input_size),), sizes, base)


def _attention(m: Any) -> Form:
    """Heads stay, each head grows; keys and values of other widths than the queries' may differ."""
    same = has_one_width(m)
    own = {"head": m.head_dim} | ({} if same else {"keys": m.kdim, "values": m.vdim})

    def sizes(own: Mapping[str, Dim], inp: Sequence[Dim]) -> Sizes:
        width = own["head"] * m.num_heads
        keys, values = own.get("keys", width), own.get("values", width)
        return Sizes(
            {
                "in_proj_weight": (3 * width, width),
                "q_proj_weight": (width, width),
                "k_proj_weight": (width, keys),
                "v_proj_weight": (width, values),
                "in_proj_bias": (3 * width,),
                "bias_k": (1, 1, width),
                "bias_v": (1, 1, width),
                "out_proj.weight": (width, width),
                "out_proj.bias": (width,),
            },
            {
                "embed_dim": width,
                "head_dim": own["head"],
                "kdim": keys,
                "vdim": values,
                "out_proj.in_features": width,
                "out_proj.out_features": width,
            },
        )

    return Form(own, (), sizes, nn.MultiheadAttention)


_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_STATISTICS = ("weight", "bias", "running_mean", "running_var")
_BATCH = BatchNormBase
_INSTANCE: tuple[tuple[type[nn.Module], int], ...] = (
    (nn.InstanceNorm1d, -2),
    (nn.InstanceNorm2d, -3),
    (nn.InstanceNorm3d, -4),
)
_FORMS: tuple[tuple[type[nn.Module] | tuple[type[nn.Module], ...], Any], ...] = (
    (nn.Linear, _linear),
    ((*_CONVS, *_TRANSPOSED), _conv),
    (_BATCH, _channel_norm(1, _BATCH, "num_features", _STATISTICS)),
    *((t, _channel_norm(axis, t, "num_features", _STATISTICS)) for t, axis in _INSTANCE),
    ((nn.LayerNorm, nn.RMSNorm), _layer_norm),
    (nn.GroupNorm, _channel_norm(1, nn.GroupNorm, "num_channels", ("weight", "bias"))),
    (nn.PReLU, _prelu),
    ((nn.Embedding, nn.EmbeddingBag), _embedding),
    (nn.RNNBase, _recurrent),
    (nn.RNNCellBase, _cell),
    (nn.MultiheadAttention, _attention),
)
