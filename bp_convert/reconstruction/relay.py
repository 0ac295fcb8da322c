"""What the blocks of a model are given, each from the block before it where that is all there is.

A whole model run up to its tenth block runs ten of them, for each batch. Where a block is given
what the one before it puts out, and else what that was given itself, one block is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.calibration.tap import Batches
from bp_convert.graph.example import device_of
from bp_convert.graph.running import quiet_forward
from bp_convert.graph.tree import map_tensors, tensors_in
from bp_convert.reconstruction.shelf import Shelf

Catch = Callable[[nn.Module, int], Any]  # what a block is given in a batch, by the whole model


class Relay:
    """Hands a model's blocks what they are given in its batches, one block after the other.

    How a block's inputs follow from those of the one before is read off the first batch, and taken
    if it holds on the last one, too; else the whole model runs.

    Args:
        model: it may change between two blocks, up to the one that was asked for last.
        catch: runs the model up to a block; returns the arguments that it is given.
    """

    def __init__(self, model: nn.Module, batches: Batches, catch: Catch) -> None:
        self.model, self.batches, self.catch = model, batches, catch
        self.name = ""
        self.cases: Shelf | None = None

    @torch.no_grad()
    def inputs_of(self, name: str) -> Shelf:
        """Return what a block is given in each batch: its arguments and keywords. They are held
        until the next block is asked for."""
        block, count = self.model.get_submodule(name), len(self.batches)
        found = Shelf(count)
        follow = self._follow(block) if self.cases is not None and self.name != name else None
        for number in range(count):
            found.put(self.catch(block, number) if follow is None else follow(number))
        self.close()
        self.name, self.cases = name, found
        return found

    def outputs(self, number: int) -> list[Tensor]:
        """Run the block that was asked for last alone on a batch; return what it puts out."""
        assert self.cases is not None
        device = device_of(self.model)
        args, kwargs = map_tensors(lambda one: one.to(device, copy=True), self.cases[number])
        with quiet_forward():
            return tensors_in(self.model.get_submodule(self.name)(*args, **kwargs))

    def close(self) -> None:
        """Give up what is held."""
        if self.cases is not None:
            self.cases.close()
        self.cases = None

    def _follow(self, block: nn.Module) -> Callable[[int], Any] | None:
        """Return what makes a block's inputs of the one before; None where nothing does."""
        first = self.catch(block, 0)
        known = self._known(0)
        places = [
            next((at for at, two in enumerate(known) if _same(one, two)), None)
            for one in tensors_in(first, objects=True)
        ]
        if None in places:
            return None

        def follow(number: int) -> Any:
            known = iter([self._known(number)[at] for at in places if at is not None])
            return map_tensors(lambda _: next(known), first)

        last = len(self.batches) - 1
        due, found = self.catch(block, last), follow(last)
        tensors = [tensors_in(one, objects=True) for one in (due, found)]
        alike = len(tensors[0]) == len(tensors[1]) and all(map(_same, *tensors))
        return follow if alike and _bare(due) == _bare(found) else None

    def _known(self, number: int) -> list[Tensor]:
        """Return what the block before puts out in a batch, and what it is given."""
        assert self.cases is not None
        device = device_of(self.model)
        given = tensors_in(self.cases[number], objects=True)
        return [*self.outputs(number), *(one.to(device) for one in given)]


def _same(one: Tensor, two: Tensor) -> bool:
    return one.dtype == two.dtype and torch.equal(one, two)


def _bare(value: Any) -> str:
    """Return what tells all but the tensors of a value."""
    return repr(map_tensors(lambda one: one.new_empty(0), value))
