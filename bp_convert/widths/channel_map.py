"""Which old channel each new input of a widened layer stands for, measured by running both.

Shapes tell how wide a consumer becomes, not in which order. Instead of following the order
through a table of operations, the source and an empty widened copy are run side by side. Every
layer that mixes channels gives out, in the source, random numbers, and in the copy the same
numbers with each channel repeated. What lies between two such layers (views, concatenations,
pools, norms) is the user's own code and runs for real. A consumer's new input is then compared,
column by column, with its old one: equal columns are the same channel. A column that equals none
means that the code in between does not keep repeats, and that the layer's map is unknown.
No large product is ever computed, so this costs about two forward passes of the small layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bp_convert.graph.reshape import held, owner_of, reshaped
from bp_convert.graph.running import Args, Kwargs, evaluating, quiet_forward, same_draws
from bp_convert.graph.tree import tensors_in
from bp_convert.graph.walk import Site, walk
from bp_convert.kinds import Spread
from bp_convert.values.plan import LayerPlan, Plan
from bp_convert.widths.channel_values import (
    empty_output,
    fingerprint,
    map_floats,
    match,
    shaken_like,
)
from bp_convert.widths.followers import (
    Follow,
    axis_of,
    channel_axis,
    follow,
    in_place,
    interleave,
    mixes,
)

SEED = 20190304  # of the values by which channels are told apart


@dataclass
class ChannelMaps:
    """What the comparison found.

    Attributes:
        spreads: for each layer that could be converted, how its channels stem from the old ones.
        unknown: layers whose input map could not be found, with the reason.
        follows: how each resized tensor of another module follows.
        fresh: modules whose resized tensors must start afresh, with the reason.
        preserved: every map is known and the outputs agree: copies compute the same function.
    """

    spreads: dict[str, Spread] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    follows: dict[str, Follow] = field(default_factory=dict)
    fresh: dict[str, str] = field(default_factory=dict)
    preserved: bool = True


def measure_maps(
    model: nn.Module,
    plan: Plan,
    args: Args,
    kwargs: Kwargs,
    kept: Mapping[str, Tensor] | None = None,
) -> ChannelMaps:
    """Run the source and a widened copy in eval mode and compare what the layers are given.

    Args:
        args: positional example inputs; a batch of four or more tells channels apart best.
        kwargs: keyword example inputs.
        kept: for layers that are narrowed, the old output of each new one, (K',).
    """
    with same_draws(SEED, model), torch.no_grad(), quiet_forward():
        return _Comparison(model, plan, kept or {}).run(args, kwargs)


@dataclass
class _Watch:
    """A module whose input is compared; ``mixes`` where its output is exchanged too."""

    name: str
    axis: int | None
    mixes: bool
    site: Site | None = None
    layer: LayerPlan | None = None


class _Comparison:
    def __init__(self, model: nn.Module, plan: Plan, kept: Mapping[str, Tensor]) -> None:
        self.model = model
        self.plan = plan
        self.kept = kept
        self.maps = ChannelMaps()
        self.inputs: dict[str, list[Tensor]] = {}  # fingerprints of the source's columns
        self.outputs: dict[str, list[Any]] = {}
        self.found: dict[str, Tensor] = {}
        self.sites = {site.name: site for site in walk(model)}
        self.names = {id(module): name for name, module in model.named_modules()}
        self.resized: dict[str, list[Any]] = {}  # module name -> its resizes
        for resize in plan.resizes:
            module, _ = owner_of(model, resize.name)
            self.resized.setdefault(self.names[id(module)], []).append(resize)
        self.watches = self._watches()

    def _watches(self) -> list[_Watch]:
        watches = []
        followers = dict.fromkeys(self.resized)
        for name, site in self.sites.items():
            layer = self.plan.layer(name)
            uncalled = self._is_out_projection(name)
            if layer is None or uncalled or getattr(site.module, "groups", 1) != 1:
                continue
            followers.pop(name, None)
            axis = site.kind.channel_axis(site.module)
            watches.append(_Watch(name, axis, True, site, layer))
        for name in followers:
            module = self.model.get_submodule(name)
            axis = channel_axis(module)
            if axis is not None:
                watches.append(_Watch(name, axis, mixes(module)))
        return watches

    def run(self, args: Args, kwargs: Kwargs) -> ChannelMaps:
        source, wide, shaken = self._copies()
        for watch in self.watches:
            self._hook(source.get_submodule(watch.name), watch, self._remember)
            module = wide.get_submodule(watch.name)
            if watch.mixes:
                module.forward = self._substitute(watch)
            else:
                self._hook(module, watch, self._compare_and_fill(shaken, module))
        try:
            before = tensors_in(source(*args, **kwargs))
            after = tensors_in(wide(*args, **kwargs))
        except Exception as problem:  # the user's forward, on values that are none of its own
            return self._nothing(problem)
        same = len(before) == len(after) and all(
            a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)
            for a, b in zip(before, after, strict=True)
        )
        self._finish()
        self.maps.preserved = same and not self.maps.unknown and not self.maps.fresh
        return self.maps

    def _nothing(self, problem: Exception) -> ChannelMaps:
        """Return maps in which nothing is known."""
        why = f"the model does not run on drawn values ({type(problem).__name__}: {problem})"
        names = [one.name for one in self.watches if one.layer is not None]
        fresh = dict.fromkeys(self.resized.keys() - set(names), why)
        return ChannelMaps(unknown=dict.fromkeys(names, why), fresh=fresh, preserved=False)

    def _copies(self) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
        """Copy the model twice: with followers shaken, so that no two channels look alike, and
        widened, with tensors that take no memory in the layers whose output is exchanged."""
        shaken: dict[str, Tensor] = {}
        old: dict[int, Tensor] = {}  # nothing is shared: a forward may write on its weights
        new: dict[int, Tensor] = {}
        empty = {watch.name for watch in self.watches if watch.mixes}
        for name, resizes in self.resized.items():
            module = self.model.get_submodule(name)
            for resize in resizes:
                key = resize.name.rpartition(".")[2]
                tensor = held(module, key)
                assert tensor is not None
                if name in empty:
                    fill = torch.zeros((), dtype=tensor.dtype).expand(resize.after)
                else:
                    shaken[resize.name] = shaken_like(tensor, key)
                    old[id(tensor)] = _like(tensor, shaken[resize.name])
                    plain = _guess(resize, self._is_out_projection(name))
                    self.maps.follows[resize.name] = plain
                    fill = plain.apply(shaken[resize.name])
                new[id(tensor)] = _like(tensor, fill)
        still = self.plan.model_copy(update={"attrs": ()})
        source = reshaped(self.model, still, {}, old, apart=True)
        wide = reshaped(self.model, self.plan, {}, new, apart=True)
        return evaluating(source), evaluating(wide), shaken

    def _hook(
        self, module: nn.Module, watch: _Watch, act: Callable[[_Watch, Tensor], None]
    ) -> None:
        def before(_: nn.Module, args: Args, kwargs: Kwargs) -> None:
            given = _first(args, kwargs)
            if given is not None and watch.axis is not None:
                watch.axis = axis_of(module, watch.axis, tuple(given.shape))
                act(watch, given)

        module.register_forward_pre_hook(before, with_kwargs=True)
        if watch.mixes:
            plain = module.forward

            def forward(*given: Any, **named: Any) -> Any:
                output = empty_output(module, given, named)
                return self._exchange(watch, plain(*given, **named) if output is None else output)

            module.forward = forward

    def _remember(self, watch: _Watch, given: Tensor) -> None:
        assert watch.axis is not None
        self.inputs.setdefault(watch.name, []).append(fingerprint(given, watch.axis))

    def _exchange(self, watch: _Watch, output: Any) -> Any:
        drawn = map_floats(output, lambda t: torch.rand_like(t) + 0.1)
        self.outputs.setdefault(watch.name, []).append(drawn)
        return map_floats(drawn, Tensor.clone)  # the model may write to what it is given

    def _substitute(self, watch: _Watch) -> Callable[..., Any]:
        """Return the forward of an empty layer: compare the input, repeat the source's output."""
        calls = iter(range(1 << 30))

        def forward(*args: Any, **kwargs: Any) -> Any:
            call = next(calls)
            given = _first(args, kwargs)
            if given is not None and watch.axis is not None:
                self._compare(watch, given, call)
            drawn = self.outputs[watch.name][call]
            return map_floats(drawn, lambda t: self._repeat(watch, t).clone())

        return forward

    def _repeat(self, watch: _Watch, drawn: Tensor) -> Tensor:
        """Repeat the channels of a source output as the widened layer would give them."""
        axis = -1 if watch.axis is None else watch.axis
        width = drawn.shape[axis]
        if watch.layer is not None:
            before, after = watch.layer.outputs
            wide = width // before * after
            if watch.name in self.kept:
                parts = [self.kept[watch.name] + part for part in range(0, width, before)]
                return drawn.index_select(axis, torch.cat(parts).to(drawn.device))
        else:
            wide = self._follower_outputs(watch, width)
        index = None if wide == width else interleave(width, wide)
        return drawn if index is None else drawn.index_select(axis, index.to(drawn.device))

    def _follower_outputs(self, watch: _Watch, width: int) -> int:
        for change in self.plan.attrs:
            if change.module == watch.name and change.attr in ("out_channels", "nf"):
                assert isinstance(change.after, int)
                return change.after
        # A subclass with a forward of its own may not look at its attributes.
        module = self.model.get_submodule(watch.name)
        axis = 1 if getattr(module, "transposed", False) or hasattr(module, "nf") else 0
        for resize in self.resized[watch.name]:
            if resize.name.rpartition(".")[2] == "weight":
                times: int = resize.after[axis] // resize.before[axis]
                return width * times
        return width

    def _compare_and_fill(
        self, shaken: dict[str, Tensor], module: nn.Module
    ) -> Callable[[_Watch, Tensor], None]:
        """Return the hook of a follower in the copy: set its tensors once its input is known."""
        calls = iter(range(1 << 30))

        def act(watch: _Watch, given: Tensor) -> None:
            self._compare(watch, given, next(calls))
            index = self.found.get(watch.name)
            if index is None:
                return
            for resize in self.resized[watch.name]:
                key = resize.name.rpartition(".")[2]
                rule = follow(
                    self.model.get_submodule(watch.name), key, resize.before, resize.after, index
                )
                tensor = held(module, key)
                if rule is not None and tensor is not None:
                    self.maps.follows[resize.name] = rule
                    tensor.copy_(rule.apply(shaken[resize.name]))

        return act

    def _compare(self, watch: _Watch, given: Tensor, call: int) -> None:
        assert watch.axis is not None
        calls = self.inputs.get(watch.name, [])
        index = match(calls[call], fingerprint(given, watch.axis)) if call < len(calls) else None
        known = self.found.get(watch.name)
        if index is None:
            self.maps.unknown.setdefault(
                watch.name, "its new input does not repeat the channels of its old one"
            )
        elif known is not None and not torch.equal(known, index):
            self.maps.unknown.setdefault(
                watch.name, "it is called on inputs whose channels lie in different orders"
            )
        else:
            self.found[watch.name] = index

    def _finish(self) -> None:
        for watch in self.watches:
            index = self.found.get(watch.name)
            if watch.name in self.maps.unknown:
                index = None
            if watch.layer is not None:
                before, after = watch.layer.outputs
                outputs = None if before == after else interleave(before, after)
                outputs = self.kept.get(watch.name, outputs)
                same = watch.layer.inputs[0] == watch.layer.inputs[1]
                inputs = None if same or watch.site is None else index
                self.maps.spreads[watch.name] = Spread(inputs, outputs)
                if watch.name not in self.inputs and not same and watch.axis is not None:
                    self.maps.unknown.setdefault(watch.name, "it is not called on the example")
            elif watch.mixes:
                self._finish_mixer(watch, index)
        for name in self.resized:
            module = self.model.get_submodule(name)
            if isinstance(module, nn.RNNBase | nn.RNNCellBase) and name not in self.sites:
                self.maps.fresh[name] = f"{type(module).__name__} is re-dimensioned"

    def _finish_mixer(self, watch: _Watch, index: Tensor | None) -> None:
        module = self.model.get_submodule(watch.name)
        for resize in self.resized[watch.name]:
            key = resize.name.rpartition(".")[2]
            rule = None
            if index is not None:
                rule = follow(module, key, resize.before, resize.after, index)
            if rule is None:
                why = self.maps.unknown.pop(watch.name, "the order of its inputs is not known")
                self.maps.fresh[watch.name] = why
            else:
                self.maps.follows[resize.name] = rule

    def _is_out_projection(self, name: str) -> bool:
        parent = self.model.get_submodule(name.rpartition(".")[0])
        return isinstance(parent, nn.MultiheadAttention)


def _guess(resize: Any, sums_inputs: bool) -> Follow:
    """Say how a tensor follows before its module's input is known: every axis repeats in place."""
    axes = in_place(resize.before, resize.after)
    return Follow(axes, shared=1 if sums_inputs and len(axes) == 2 else None)


def _first(args: Args, kwargs: Kwargs) -> Tensor | None:
    for leaf in [*args, *kwargs.values()]:
        if isinstance(leaf, PackedSequence):
            return leaf.data
        if isinstance(leaf, Tensor):
            return leaf
    return None


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    return nn.Parameter(value, requires_grad=False) if isinstance(tensor, nn.Parameter) else value
