"""OpenVINO's files, read from the ONNX graph and run by OpenVINO on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bp_convert.exporting.onnx_file import OnnxRuntime, pieces_as_onnx
from bp_convert.exporting.program import Program
from bp_convert.exporting.runtime import Piece, Run


class OpenvinoRuntime(OnnxRuntime):
    """OpenVINO's intermediate form: ``NAME.xml`` and, beside it, the weights in ``NAME.bin``."""

    goal = "openvino"
    suffix = ".xml"
    extra = "openvino"
    writes_with = ("openvino", *OnnxRuntime.writes_with)
    runs_with = ("openvino",)
    package = "openvino"

    def write(self, program: Program, folder: Path, name: str) -> list[Path]:
        """As ``Runtime.write``; weights keep their type; OpenVINO alone would halve them."""
        import openvino

        between = folder / "onnx"
        between.mkdir()
        graph = super().write(program, between, "graph.onnx")
        file = folder / name
        read = openvino.Core().read_model(str(graph[0]))
        openvino.save_model(read, str(file), compress_to_fp16=False)
        return [file, file.with_suffix(".bin")]

    def opened(self, file: Path, threads: int) -> Run:
        """As ``Runtime.opened``."""
        return _compiled(str(file), threads)

    def opened_pieces(self, pieces: Sequence[Piece], folder: Path, threads: int) -> list[Run]:
        """As ``Runtime.opened_pieces``."""
        return [_compiled(one, threads) for one in pieces_as_onnx(pieces)]


def _compiled(model: str | bytes, threads: int) -> Run:
    import openvino

    core: Any = openvino.Core()
    options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    request = core.compile_model(core.read_model(model), "CPU", options).create_infer_request()
    count = len(request.model_outputs)

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        request.infer([one.numpy() for one in inputs])
        outputs = (request.get_output_tensor(place).data for place in range(count))
        return [torch.from_numpy(one.copy()) for one in outputs]

    return run
