"""torch's recurrent modules of every mode: how they hang on widths, and what shapes they give."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bp_convert.kinds.shapes import Attr, Dim, Form, Sizes
from bp_convert.torch_private import parameters_of

Forward = Callable[..., Any]
_CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)


def gates(m: nn.Module) -> int:
    """Return how many matrices a recurrent module stacks in one weight."""
    mode = getattr(m, "mode", type(m).__name__)
    return 4 if mode.startswith("LSTM") else 3 if mode.startswith("GRU") else 1


def recurrent_form(m: Any, base: type[nn.Module]) -> Form:
    """Return the form of any stack of recurrent layers of torch."""
    g, directions = gates(m), 2 if m.bidirectional else 1
    own = {"out": m.hidden_size} | ({"proj": m.proj_size} if m.proj_size else {})

    def sizes(own: Mapping[str, Dim], inp: Sequence[Dim]) -> Sizes:
        hidden = own["out"]
        state = own.get("proj", hidden)
        tensors: dict[str, tuple[Dim, ...]] = {}
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

    return Form(own=own, inputs=((-1, m.input_size),), sizes=sizes, base=base)


def cell_form(m: Any) -> Form:
    """Return the form of a recurrent cell of torch."""
    g = gates(m)

    def sizes(own: Mapping[str, Dim], inp: Sequence[Dim]) -> Sizes:
        h = own["out"]
        biases = dict.fromkeys(("bias_ih", "bias_hh"), (g * h,))
        tensors = {"weight_ih": (g * h, inp[0]), "weight_hh": (g * h, h), **biases}
        return Sizes(tensors, {"input_size": inp[0], "hidden_size": h}, h)

    base = next(t for t in _CELLS if isinstance(m, t))
    return Form({"out": m.hidden_size}, ((-1, m.input_size),), sizes, base)


def shapes_only(module: nn.RNNBase) -> Forward:
    """Return a forward that computes shapes alone."""
    directions = 2 if module.bidirectional else 1
    has_cell = module.mode == "LSTM"

    def forward(given: Any, hx: Any = None) -> Any:
        hidden = module.hidden_size
        state = module.proj_size or hidden
        data = given.data if isinstance(given, PackedSequence) else given
        _require(data.shape[-1], module.input_size, "input")
        if hx is not None:
            states = hx if has_cell else (hx,)
            for one, size in zip(states, (state, hidden), strict=False):
                _require(one.shape[-1], size, "initial state")
        made = data.new_empty(*data.shape[:-1], directions * state)
        output: Any = made
        if isinstance(given, PackedSequence):
            output = PackedSequence(
                made, given.batch_sizes, given.sorted_indices, given.unsorted_indices
            )
            batch: tuple[Any, ...] = (int(given.batch_sizes[0]),)
        elif data.dim() == 2:
            batch = ()
        else:
            batch = (data.shape[0 if module.batch_first else 1],)
        layers = module.num_layers * directions
        last = data.new_empty(layers, *batch, state)
        if has_cell:
            return output, (last, data.new_empty(layers, *batch, hidden))
        return output, last

    return forward


def has_plain_cell(module: nn.RNNCellBase) -> bool:
    """Return whether a cell computes as torch's of its type does."""
    return any(isinstance(module, t) and type(module).forward is t.forward for t in _CELLS)


def cell_shapes_only(module: nn.RNNCellBase) -> Forward:
    """Return a forward of a cell that computes shapes alone."""

    def forward(given: Tensor, hx: Any = None) -> Any:
        _require(given.shape[-1], module.input_size, "input")
        if hx is not None:
            for one in hx if isinstance(hx, tuple) else (hx,):
                _require(one.shape[-1], module.hidden_size, "state")
        made = given.new_empty(*given.shape[:-1], module.hidden_size)
        return (made, made.clone()) if gates(module) == 4 else made

    return forward


def _require(found: Dim, wanted: Dim, what: str) -> None:
    if found != wanted:
        raise RuntimeError(f"{what} has {found} features where {wanted} are expected")
