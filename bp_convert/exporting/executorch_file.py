"""ExecuTorch's programs for phones and small devices, lowered to XNNPACK."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bp_convert.errors import ExportError
from bp_convert.exporting.program import Program, unsupported
from bp_convert.exporting.runtime import Piece, Run, Runtime


class ExecutorchRuntime(Runtime):
    """A ``.pte`` program: products on constants go to XNNPACK, the rest to portable kernels.

    Its memory is planned ahead, so that the batch has a largest size.
    """

    goal = "executorch"
    suffix = ".pte"
    extra = "executorch"
    writes_with = ("executorch",)
    runs_with = ("executorch",)
    package = "executorch"
    forms = ("factors", "dense")
    most = 64

    def write(self, program: Program, folder: Path, name: str) -> list[Path]:
        """As ``Runtime.write``."""
        file = folder / name
        file.write_bytes(_lowered({"forward": program}))
        return [file]

    def opened(self, file: Path, threads: int) -> Run:
        """As ``Runtime.opened``; its threads are its own affair."""
        return _methods(file, ["forward"])[0]

    def opened_pieces(self, pieces: Sequence[Piece], folder: Path, threads: int) -> list[Run]:
        """As ``Runtime.opened_pieces``: all in one program, as methods of it."""
        programs = {}
        for place, one in enumerate(pieces):
            example = one.inputs[-1]
            rows = max(len(x) for x in one.inputs)
            free = {0: torch.export.Dim("rows", max=rows)} if rows > 1 else {}
            with torch.no_grad():
                programs[f"piece{place}"] = torch.export.export(
                    one.layer, (example,), dynamic_shapes=(free,), strict=False
                )
        file = folder / "pieces.pte"
        file.write_bytes(_lowered(programs))
        return _methods(file, [*programs])


def _lowered(programs: Mapping[str, Program]) -> bytes:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made: Any = to_edge_transform_and_lower(
                dict(programs), partitioner=[XnnpackPartitioner()]
            )
            return bytes(made.to_executorch().buffer)
    except Exception as problem:
        raise unsupported(next(iter(programs.values())), "ExecuTorch", problem) from problem
    finally:
        logging.disable(before)


def _methods(file: Path, names: Sequence[str]) -> list[Run]:
    from executorch import runtime

    program: Any = runtime.Runtime.get().load_program(file)
    return [_method(program, name) for name in names]


def _method(program: Any, name: str) -> Run:
    method = program.load_method(name)

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        assert program is not None  # which has to outlive its methods
        try:
            return [one.clone() for one in method.execute([x.contiguous() for x in inputs])]
        except RuntimeError as problem:
            raise ExportError(
                where=f"ExecuTorch, on a batch of {len(inputs[0])}",
                found=f"{problem}"[:200],
                allowed="batches that its planned memory holds; products on factors can lower "
                "what it plans for",
                fix="--form dense, or smaller batches: --batch 1 --batch 2",
            ) from problem

    return run
