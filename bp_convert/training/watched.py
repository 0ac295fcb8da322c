"""Outputs inside of a model beside its teacher's: of layers, and of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bp_convert.calibration.tap import token_mask
from bp_convert.errors import TrainingError
from bp_convert.feeding.feed import Micro
from bp_convert.graph.tree import tensors_in
from bp_convert.kinds import is_twin
from bp_convert.reconstruction.block_finding import MANY, blocks_of
from bp_convert.reconstruction.gap import chosen, relative, squares
from bp_convert.training.loss import Objective
from bp_convert.values.training import AUTO_BLOCKS, Distill

LEAST = 1e-12  # mean square of an output, which its error is at least divided by


class Counterparts:
    """Outputs of modules of a model and of the same names in its teacher, of the passes inside
    ``with``: of each the first tensor of floating-point numbers.

    Args:
        names: modules that both models have.

    Attributes:
        skipped: those whose outputs have another shape than the teacher's.
        shapes: of the outputs that were compared in the last passes.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.skipped: set[str] = set()
        self.shapes: set[torch.Size] = set()
        self._watching = False
        self._seen: dict[str, list[Tensor]] = {}
        self._wanted: dict[str, list[Tensor]] = {}
        self._handles = [
            model.get_submodule(name).register_forward_hook(self._keep(store, name))
            for model, store in ((student, self._seen), (teacher, self._wanted))
            for name in self.names
        ]

    def _keep(self, store: dict[str, list[Tensor]], name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            tensors = tensors_in(output) if self._watching else []
            numbers = [one for one in tensors if one.is_floating_point()]  # no indices
            if numbers:
                store.setdefault(name, []).append(numbers[0])

        return hook

    def __enter__(self) -> Counterparts:
        self._watching = True
        return self

    def __exit__(self, *_: object) -> None:
        self._watching = False

    def gap(self, mask: Tensor | None = None) -> Tensor | None:
        """Return the squared error relative to the teacher's square, averaged over outputs, of the
        passes since the last call; None where no shapes agree.

        Args:
            mask: (N, T), which tokens count.
        """
        found: list[Tensor] = []
        wanted: list[Tensor] = []
        for name in self.names:
            pairs = zip(self._seen.get(name, []), self._wanted.get(name, []), strict=False)
            for mine, theirs in pairs:
                if mine.shape != theirs.shape:
                    self.skipped.add(name)
                else:
                    found.append(mine)
                    wanted.append(theirs)
        self._seen.clear()
        self._wanted.clear()
        self.shapes = {one.shape for one in found}
        if not found:
            return None
        found, wanted = chosen(found, mask), chosen(wanted, mask)
        gaps, sizes = squares(found, wanted)
        floor = [LEAST * max(1, one.numel()) for one in wanted]
        return relative(gaps, sizes, torch.tensor(floor, device=sizes.device))

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


class Watched:
    """The outputs inside of a model that count in its loss.

    Args:
        distill: weights of the terms.

    Raises:
        TrainingError: a term is asked for, and the models have nothing that it could compare.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module | None, distill: Distill) -> None:
        self.sets: dict[str, Counterparts] = {}
        if teacher is None:
            return
        if distill.layers:
            self.sets["layers"] = Counterparts(student, teacher, layers_in(student, teacher))
        if distill.blocks:
            names = blocks_in(student, teacher)
            if distill.blocks == "auto":
                alike = len({type(student.get_submodule(name)) for name in names}) == 1
                if len(names) < MANY or not alike:
                    return
            elif not names:
                raise _none("distill.blocks", "no repeated blocks that the teacher has as well")
            self.sets["blocks"] = Counterparts(student, teacher, names)

    def __enter__(self) -> Watched:
        for one in self.sets.values():
            one.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.sets.values():
            one.__exit__()

    def gaps(self, micro: Micro) -> dict[str, Tensor | None]:
        """Return the error of each term over the passes since the last call, as ``Objective`` takes
        them."""
        mask = token_mask((micro.args, micro.kwargs))
        return {name: one.gap(mask) for name, one in self.sets.items()}

    def settled(self, objective: Objective, micro: Micro) -> Objective:
        """Return the loss with the weight of the blocks' term chosen, where that is left open, by
        the pass just seen: it counts where all blocks put out one shape, and the models no class
        scores.

        Raises:
            TrainingError: nothing else counts, and no two outputs can be compared.
        """
        gaps = self.gaps(micro)
        asked = [term for term in gaps if getattr(objective.distill, term) != "auto"]
        if objective.inside_alone and all(gaps[term] is None for term in asked):
            raise TrainingError(
                where=" and ".join(f"distill.{term}" for term in asked),
                found="no output of the teacher's shape, and no other term of the loss",
                allowed="outputs that can be compared, labels, or the teacher's outputs",
                fix="let distill.logits count, or give data with labels",
            )
        if objective.distill.blocks != "auto":
            return objective
        blocks = self.sets.pop("blocks", None)
        if blocks is None:
            return objective.with_blocks(0.0)
        if len(blocks.shapes) == 1 and not blocks.skipped and objective.learns_features:
            self.sets["blocks"] = blocks
            return objective.with_blocks(AUTO_BLOCKS)
        blocks.remove()
        return objective.with_blocks(0.0)

    @property
    def notes(self) -> list[str]:
        """What was left out."""
        return [
            f"distill.{term}: {len(one.skipped)} of {len(one.names)} {term} have other widths "
            "than the teacher's and were left out"
            for term, one in self.sets.items()
            if one.skipped
        ]

    def remove(self) -> None:
        """Take the hooks off."""
        for one in self.sets.values():
            one.remove()


def layers_in(student: nn.Module, teacher: nn.Module) -> list[str]:
    """Return the names of a model's bilinear layers, outermost first, that its teacher has.

    Raises:
        TrainingError: there is none.
    """
    theirs = dict(teacher.named_modules())
    twins = [name for name, one in student.named_modules() if is_twin(one)]
    found = [
        name
        for name in twins
        if name in theirs and not any(name.startswith(f"{one}.") for one in twins if one)
    ]
    if not found:
        raise _none("distill.layers", "no bilinear layer that stands for one of the teacher's")
    return found


def blocks_in(student: nn.Module, teacher: nn.Module) -> list[str]:
    """Return the names of a model's blocks that its teacher has."""
    theirs = dict(teacher.named_modules())
    return [name for name in blocks_of(student) if name in theirs]


def _none(where: str, found: str) -> TrainingError:
    return TrainingError(
        where=where,
        found=found,
        allowed="a converted model and the model that it was converted from",
        fix=f"leave {where} out",
    )
