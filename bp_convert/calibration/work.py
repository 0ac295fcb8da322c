"""How many examples are looked at: fewer where passes over all of them would take long.

What is done must not hang on how busy a machine is, so multiply-adds are counted, not seconds. At
some 3e10 of them a second, of one CPU core, none of these is above six minutes, and models of less
than some 1e9 for an example see all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bp_convert.calibration.tap import Batch, Batches
from bp_convert.free_memory import free_memory
from bp_convert.graph.example import first_rows
from bp_convert.graph.tree import rows_in, tensors_in
from bp_convert.torch_private import storage_id

BACKWARD = 3.0  # times a forward pass, of one with its way back
FASTER = 20.0  # times that an accelerator does them
GATHER = 5e12  # multiply-adds of looking at what layers get,
SLOPES = 3e12  # of passes back and forth,
TRIALS = 3e12  # of perturbing each layer,
REHEARSAL = 1e12  # of trying one choice,
FIT = 1e13  # and of fitting layer after layer
LEAST = 8  # examples,
FEW = 4  # of passes for each layer
SHARE = 0.1  # of the free memory, that what one pass leaves for the next may take


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """Return what names the memory that holding a tensor holds, and its bytes: a view holds all
    that it is a part of."""
    if tensor.layout != torch.strided:
        return id(tensor), tensor.numel() * tensor.element_size()
    return storage_id(tensor), tensor.untyped_storage().nbytes()


def room_on(device: torch.device) -> int:
    """Return how many bytes on a device one pass may leave for the next."""
    there = device.type == "cuda" and torch.cuda.is_available()
    return int(SHARE * (torch.cuda.mem_get_info(device)[0] if there else free_memory()))


def within(
    batches: Batches, each: float, work: float, device: torch.device, least: int = LEAST
) -> Batches:
    """Return the first examples, as many as ``work`` is enough for.

    Args:
        each: multiply-adds of what is done with one example; 0 where not known, which takes all.
        least: examples that are taken in any case.
    """
    if not each:
        return batches
    possible = max(least, int(work * (1.0 if device.type == "cpu" else FASTER) / each))
    found: list[Batch] = []
    for batch in batches:
        rows = rows_in(batch)
        if rows > possible:
            return [*found, _first(batch, rows, possible)] if possible else found
        found.append(batch)
        possible -= rows
    return batches


def passes_over(
    batches: Batches, each: float, most: int, fewest: int, device: torch.device
) -> tuple[int, Batches]:
    """Return in how many stages layers are fitted, and to which examples: fewer stages first.

    Args:
        each: multiply-adds of one example in source and conversion together; 0 where not known.
    """
    count = sum(map(rows_in, batches))
    work = FIT * (1.0 if device.type == "cpu" else FASTER)
    # A stage ends with its last layer, in the mean half-way.
    possible = int(2 * work / (each * count)) if each and count else most
    stages = max(fewest, min(most, possible))
    return stages, within(batches, each * stages / 2, FIT, device, least=64)


def _first(batch: Batch, rows: int, count: int) -> Batch:
    """Return the first examples of a batch; all where one of its inputs does not hold them by
    rows."""
    args, kwargs = batch
    for one in (*args, *kwargs.values()):
        if isinstance(one, list) and len(one) == rows:  # of tensors, one for each example
            continue
        if any(not each.dim() or each.shape[0] != rows for each in tensors_in(one, objects=True)):
            return batch
    return first_rows(batch, count)
