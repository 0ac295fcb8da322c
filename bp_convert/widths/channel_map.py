"""Which old channel each new input of a widened layer stands for, measured by running both.

Shapes tell how wide a consumer becomes, not in which order. Instead of following the order
through a table of operations, the source and an empty widened copy are run side by side. Every
layer that mixes channels gives out, in the source, random numbers, and in the copy the same
numbers with each channel repeated. What lies between two such layers (views, concatenations,
pools, norms) is the user's own code and runs for real. A consumer's new input is then compared,
column by column, with its old one: equal columns are the same channel. A column that equals none
means that the code in between does not keep repeats, and that the layer's map is unknown.
No large product is ever computed, so this costs about two forward passes of the small layers.

Repeats lie side by side, or, where that leaves a map unknown, in blocks: attention whose heads keep
their size becomes more heads, which have to be whole ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.fakes.fake_run import first_tensor
from bp_convert.graph.reshape import held, owner_of, reshaped
from bp_convert.graph.running import Args, Kwargs, evaluating, quiet_forward, same_draws
from bp_convert.graph.tree import tensors_in
from bp_convert.graph.walk import walk
from bp_convert.kinds import Spread
from bp_convert.values.plan import LayerPlan, Plan, Resize
from bp_convert.widths.blocks import block_sizes
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

    def compared(blocks: Mapping[str, int]) -> ChannelMaps:
        with same_draws(SEED, model), torch.no_grad(), quiet_forward():
            return _Comparison(model, plan, kept or {}, blocks).run(args, kwargs)

    found = compared({})
    taken: dict[str, int] = {}
    for blocks in block_sizes(model, plan, found.unknown) if found.unknown else ():
        other = compared({**taken, **blocks})
        if len(other.unknown) + len(other.fresh) < len(found.unknown) + len(found.fresh):
            found, taken = other, {**taken, **blocks}
        if not found.unknown:
            break
    return found


@dataclass
class _Watch:
    """A module whose input is compared; ``mixes`` where its output is exchanged too.

    ``outputs`` are its channels before and after; ``layer`` is None for a follower.
    """

    name: str
    axis: int | None
    mixes: bool
    outputs: tuple[int, int]
    layer: LayerPlan | None = None


class _Comparison:
    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        kept: Mapping[str, Tensor],
        blocks: Mapping[str, int],
    ) -> None:
        self.model = model
        self.plan = plan
        self.kept = kept
        self.blocks = blocks
        self.maps = ChannelMaps()
        # By module, a value for each call of the source: fingerprints of its columns, and outputs.
        self.inputs: dict[str, deque[Tensor]] = {}
        self.outputs: dict[str, deque[Any]] = {}
        self.found: dict[str, Tensor] = {}
        self.shaken: dict[str, Tensor] = {}  # by the names of resized tensors of followers
        self.sites = {site.name: site for site in walk(model, bare=False)}
        names = {id(module): name for name, module in model.named_modules()}
        self.resized: dict[str, list[tuple[str, Resize]]] = {}  # by module: a name there, and what
        for resize in plan.resizes:
            module, key = owner_of(model, resize.name)
            self.resized.setdefault(names[id(module)], []).append((key, resize))
        self.watches = self._watches()

    def _watches(self) -> list[_Watch]:
        watches = []
        followers = dict.fromkeys(self.resized)
        for name, site in self.sites.items():
            layer = self.plan.layer(name)
            uncalled = self._is_out_projection(name)
            follows = _groups(site.module) > 1 and layer is not None and layer.action != "replaced"
            if layer is None or uncalled or follows:
                continue
            followers.pop(name, None)
            axis = site.kind.channel_axis(site.module)
            watches.append(_Watch(name, axis, not site.kind.follows, layer.outputs, layer))
        for name in followers:
            module = self.model.get_submodule(name)
            axis = channel_axis(module)
            if axis is not None:
                watches.append(_Watch(name, axis, mixes(module), self._outputs_of(name, module)))
        return watches

    def _outputs_of(self, name: str, module: nn.Module) -> tuple[int, int]:
        for change in self.plan.attrs:
            if change.module == name and change.attr in ("out_channels", "nf"):
                assert isinstance(change.before, int)
                assert isinstance(change.after, int)
                return change.before, change.after
        # A subclass with a forward of its own may not look at its attributes.
        axis = 1 if getattr(module, "transposed", False) or hasattr(module, "nf") else 0
        for key, resize in self.resized[name]:
            if key == "weight":
                return resize.before[axis], resize.after[axis]
        return 1, 1

    def run(self, args: Args, kwargs: Kwargs) -> ChannelMaps:
        source, wide = self._copies()
        for watch in self.watches:
            old, new = source.get_submodule(watch.name), wide.get_submodule(watch.name)
            self._hook(old, watch, self._remember)
            self._hook(new, watch, self._compare if watch.mixes else self._compare_and_fill)
            if watch.mixes:
                old.forward = self._drawn(watch, old)
                new.forward = self._repeated(watch)
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

    def _copies(self) -> tuple[nn.Module, nn.Module]:
        """Copy the model twice: with followers shaken, so that no two channels look alike, and
        widened, with tensors that take no memory in the layers whose output is exchanged."""
        old: dict[int, Tensor] = {}  # nothing is shared: a forward may write on its weights
        new: dict[int, Tensor] = {}
        empty = {watch.name for watch in self.watches if watch.mixes}
        for name, resizes in self.resized.items():
            module = self.model.get_submodule(name)
            for key, resize in resizes:
                tensor = held(module, key)
                assert tensor is not None
                if name in empty:
                    fill = torch.zeros((), dtype=tensor.dtype).expand(resize.after)
                else:
                    shaken = self.shaken[resize.name] = shaken_like(tensor, key)
                    old[id(tensor)] = _like(tensor, shaken)
                    # Until the module's input is known, every axis repeats in place.
                    axes = in_place(resize.before, resize.after)
                    sums_inputs = self._is_out_projection(name) and len(axes) == 2
                    plain = Follow(axes, shared=1 if sums_inputs else None)
                    self.maps.follows[resize.name] = plain
                    fill = plain.apply(shaken)
                new[id(tensor)] = _like(tensor, fill)
        still = self.plan.model_copy(update={"attrs": ()})
        source = reshaped(self.model, still, {}, old, apart=True)
        wide = reshaped(self.model, self.plan, {}, new, apart=True)
        return evaluating(source), evaluating(wide)

    def _hook(
        self, module: nn.Module, watch: _Watch, act: Callable[[_Watch, nn.Module, Tensor], None]
    ) -> None:
        """Let ``act`` see the fingerprint of what each call of a module is given."""

        def before(_: nn.Module, args: Args, kwargs: Kwargs) -> None:
            given = first_tensor(args, kwargs)
            if given is not None and watch.axis is not None:
                watch.axis = axis_of(module, watch.axis, tuple(given.shape))
                act(watch, module, fingerprint(given, watch.axis))

        module.register_forward_pre_hook(before, with_kwargs=True)

    def _drawn(self, watch: _Watch, module: nn.Module) -> Callable[..., Any]:
        """Return the forward of a mixing layer in the source: it gives out random numbers."""
        plain = module.forward

        def forward(*given: Any, **named: Any) -> Any:
            output = empty_output(module, given, named)
            output = plain(*given, **named) if output is None else output
            drawn = map_floats(output, lambda t: torch.rand_like(t) + 0.1)
            self.outputs.setdefault(watch.name, deque()).append(drawn)
            return map_floats(drawn, Tensor.clone)  # the model may write to what it is given

        return forward

    def _repeated(self, watch: _Watch) -> Callable[..., Any]:
        """Return the forward of an empty layer: it repeats the source's output."""

        def forward(*_: Any, **__: Any) -> Any:
            drawn = self.outputs[watch.name].popleft()
            return map_floats(drawn, lambda t: self._repeat(watch, t).clone())

        return forward

    def _repeat(self, watch: _Watch, drawn: Tensor) -> Tensor:
        """Repeat the channels of a source output as the widened layer would give them."""
        axis = -1 if watch.axis is None else watch.axis
        width = drawn.shape[axis]
        before, after = watch.outputs
        if watch.name in self.kept:
            index = torch.cat([self.kept[watch.name] + part for part in range(0, width, before)])
        elif before == after:
            return drawn
        else:
            index = interleave(width, width // before * after, self.blocks.get(watch.name, 1))
        return drawn.index_select(axis, index.to(drawn.device))

    def _remember(self, watch: _Watch, _: nn.Module, columns: Tensor) -> None:
        self.inputs.setdefault(watch.name, deque()).append(columns)

    def _compare(self, watch: _Watch, _: nn.Module, columns: Tensor) -> None:
        calls = self.inputs.get(watch.name)
        index = match(calls.popleft(), columns) if calls else None
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

    def _compare_and_fill(self, watch: _Watch, module: nn.Module, columns: Tensor) -> None:
        """Set the tensors of a follower in the copy once its input is known."""
        self._compare(watch, module, columns)
        for key, resize, rule in self._rules(watch, self.found.get(watch.name)):
            tensor = held(module, key)
            if rule is not None and tensor is not None:
                self.maps.follows[resize.name] = rule
                tensor.copy_(rule.apply(self.shaken[resize.name]))

    def _rules(
        self, watch: _Watch, index: Tensor | None
    ) -> Iterator[tuple[str, Resize, Follow | None]]:
        """Yield how each resized tensor of a follower follows its input, where that is known."""
        module = self.model.get_submodule(watch.name)
        for key, resize in self.resized.get(watch.name, ()):
            rule = None
            if index is not None:
                rule = follow(module, key, resize.before, resize.after, index)
            yield key, resize, rule

    def _finish(self) -> None:
        for watch in self.watches:
            name, unknown = watch.name, self.maps.unknown
            index = None if name in unknown else self.found.get(name)
            if watch.layer is not None:
                if index is not None and not _in_groups(self.sites[name].module, index):
                    unknown[name] = "its channels do not keep to their groups"
                before, after = watch.outputs
                block = self.blocks.get(name, 1)
                outputs = None if before == after else interleave(before, after, block)
                same = watch.layer.inputs[0] == watch.layer.inputs[1]
                spread = Spread(None if same else index, self.kept.get(name, outputs))
                self.maps.spreads[name] = spread
                if name not in self.inputs and not same and watch.axis is not None:
                    unknown.setdefault(name, "it is not called on the example")
            elif watch.mixes:
                for _, resize, rule in self._rules(watch, index):
                    if rule is None:
                        why = unknown.pop(name, "the order of its inputs is not known")
                        self.maps.fresh[name] = why
                    else:
                        self.maps.follows[resize.name] = rule
        for name in self.resized:
            module = self.model.get_submodule(name)
            if isinstance(module, nn.RNNBase | nn.RNNCellBase) and name not in self.sites:
                self.maps.fresh[name] = f"{type(module).__name__} is re-dimensioned"

    def _is_out_projection(self, name: str) -> bool:
        parent = self.model.get_submodule(name.rpartition(".")[0])
        return isinstance(parent, nn.MultiheadAttention)


def _groups(module: nn.Module) -> int:
    return int(getattr(module, "groups", 1))


def _in_groups(module: Any, index: Tensor) -> bool:
    """Return whether each group of a convolution gets the channels that it had, in the same
    order as every other group."""
    many = _groups(module)
    if many == 1:
        return True
    apart = index.view(many, -1)
    each = module.in_channels // many
    own = apart[0] + torch.arange(many)[:, None] * each
    return torch.equal(apart, own) and int(apart[0].max()) < each


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    return nn.Parameter(value, requires_grad=False) if isinstance(tensor, nn.Parameter) else value
