"""torch's recurrent modules of every mode: how they hang on widths, and what shapes they give."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bp_convert.kinds.shapes import Attr, Dim, Form, Sizes
from bp_convert.recurrence.steps import RECURRENCES, mode_of, projected
from bp_convert.torch_private import parameters_of

Forward = Callable[..., Any]


def recurrent_form(m: Any, base: type[nn.Module]) -> Form:
    """Return the form of any stack of recurrent layers of torch."""
    g, directions = RECURRENCES[m.mode].gates, 2 if m.bidirectional else 1

    def sizes(own: Mapping[str, Dim], inp: Sequence[Dim]) -> Sizes:
        state = own["out"]
        hidden = projected(m.hidden_size, m.proj_size, state) if m.proj_size else state
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
        return Sizes(tensors, attrs, state)

    own = {"out": m.proj_size or m.hidden_size}
    return Form(own=own, inputs=((-1, m.input_size),), sizes=sizes, base=base)


def cell_form(m: Any, base: type[nn.Module]) -> Form:
    """Return the form of a recurrent cell of torch."""
    g = RECURRENCES[mode_of(m)].gates

    def sizes(own: Mapping[str, Dim], inp: Sequence[Dim]) -> Sizes:
        h = own["out"]
        biases = dict.fromkeys(("bias_ih", "bias_hh"), (g * h,))
        tensors = {"weight_ih": (g * h, inp[0]), "weight_hh": (g * h, h), **biases}
        return Sizes(tensors, {"input_size": inp[0], "hidden_size": h}, h)

    return Form({"out": m.hidden_size}, ((-1, m.input_size),), sizes, base)


def shapes_only(module: nn.RNNBase) -> Forward:
    """Return a forward that computes shapes alone."""
    directions = 2 if module.bidirectional else 1
    has_cell = module.mode == "LSTM"

    def forward(given: Any, hx: Any = None) -> Any:
        hidden = module.hidden_size
        state = module.proj_size or hidden
        data = given.data if isinstance(given, PackedSequence) else given
        require(data.shape[-1], module.input_size, "input")
        if hx is not None:
            states = hx if has_cell else (hx,)
            for one, size in zip(states, (state, hidden), strict=False):
                require(one.shape[-1], size, "initial state")
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


def cell_shapes_only(module: nn.RNNCellBase) -> Forward:
    """Return a forward of a cell that computes shapes alone."""

    def forward(given: Tensor, hx: Any = None) -> Any:
        require(given.shape[-1], module.input_size, "input")
        if hx is not None:
            for one in hx if isinstance(hx, tuple) else (hx,):
                require(one.shape[-1], module.hidden_size, "state")
        made = given.new_empty(*given.shape[:-1], module.hidden_size)
        return (made, made.clone()) if mode_of(module) == "LSTM" else made

    return forward


def require(found: Dim, wanted: Dim, what: str) -> None:
    """Ask that two sizes agree.

    Raises:
        RuntimeError: they do not.
    """
    if found != wanted:
        raise RuntimeError(f"{what} has {found} features where {wanted} are expected")
