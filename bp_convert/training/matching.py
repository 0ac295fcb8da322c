"""Outputs of converted layers beside those of the layers that they stand for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.graph.tree import tensors_in
from bp_convert.kinds import is_twin


class LayerPairs:
    """Hooks on the bilinear layers of a model and on the same names in its teacher.

    Args:
        student: the converted model.
        teacher: its source.

    Attributes:
        names: layers that have a partner.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        theirs = dict(teacher.named_modules())
        mine = {
            name: module
            for name, module in student.named_modules()
            if is_twin(module) and name in theirs
        }
        self.names = tuple(mine)
        self.skipped: set[str] = set()
        self._seen: dict[str, list[Tensor]] = {}
        self._wanted: dict[str, list[Tensor]] = {}
        self._handles = [
            *(m.register_forward_hook(_keep(self._seen, name)) for name, m in mine.items()),
            *(theirs[n].register_forward_hook(_keep(self._wanted, n)) for n in self.names),
        ]

    def gap(self) -> Tensor | None:
        """Return the mean over layers of the squared difference relative to the teacher's
        output's square, of the passes since the last call; None where no shapes agree."""
        found = []
        for name in self.names:
            for mine, theirs in zip(
                self._seen.get(name, []), self._wanted.get(name, []), strict=False
            ):
                if mine.shape != theirs.shape:
                    self.skipped.add(name)
                    continue
                theirs = theirs.float()
                size = theirs.square().mean().clamp(min=1e-12)
                found.append((mine.float() - theirs).square().mean() / size)
        self.clear()
        return torch.stack(found).mean() if found else None

    def clear(self) -> None:
        """Forget what was seen."""
        self._seen.clear()
        self._wanted.clear()

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def _keep(store: dict[str, list[Tensor]], name: str) -> Any:
    def hook(_: nn.Module, __: Any, output: Any) -> None:
        tensors = tensors_in(output)
        if tensors:
            store.setdefault(name, []).append(tensors[0])

    return hook
