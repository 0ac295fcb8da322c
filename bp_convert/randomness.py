"""Random states: mixed seeds, states as plain values, states kept apart."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from bp_convert.graph.running import same_draws


def mixed(*numbers: int) -> int:
    """Return a seed that all of the numbers decide."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


class Aside:
    """Random states of their own, in use inside ``with``."""

    def __init__(self, seed: int) -> None:
        before = random_state()
        with same_draws(seed):
            self._state = random_state()
        set_random_state(before)  # the devices' as well

    def __enter__(self) -> None:
        self._before = random_state()
        set_random_state(self._state)

    def __exit__(self, *_: object) -> None:
        self._state = random_state()
        set_random_state(self._before)


def random_state() -> dict[str, Any]:
    """Return the states of python's, numpy's and torch's generators as plain values."""
    kind, keys, place, has_gauss, gauss = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(np.array(keys).astype(np.int64)), place, has_gauss,
                  gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }  # fmt: skip


def set_random_state(state: dict[str, Any]) -> None:
    """Put the generators into a state that ``random_state`` returned."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    kind, numbers, place, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, numbers.numpy().astype(np.uint32), place, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
