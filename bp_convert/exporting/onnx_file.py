"""ONNX files, run by onnxruntime."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bp_convert.exporting.onnx_recurrent import recurrent_forward
from bp_convert.exporting.program import Program, unsupported
from bp_convert.exporting.runtime import Piece, Run, Runtime
from bp_convert.values.literals import Goal

LARGEST = 2**31 - 2**20  # bytes that one file may hold; above that weights stand beside it
SMALL = 512  # numbers in what may be computed before


class OnnxRuntime(Runtime):
    """ONNX, by torch's own exporter."""

    goal: ClassVar[Goal] = "onnx"
    suffix = ".onnx"
    extra = "onnx"
    writes_with: ClassVar[tuple[str, ...]] = ("onnx", "onnxscript")
    runs_with: ClassVar[tuple[str, ...]] = ("onnxruntime",)
    package = "onnxruntime"
    forms = ("factors", "built")

    def write(self, program: Program, folder: Path, name: str) -> list[Path]:
        """As ``Runtime.write``; weights beyond 2 GB go into ``NAME.data``."""
        file = folder / name
        made = onnx_program(program, "ONNX")
        held = sum(
            one.const_value.nbytes
            for one in made.model.graph.initializers.values()
            if one.const_value is not None
        )
        made.save(str(file), external_data=held > LARGEST)
        return [file, *(one for one in sorted(folder.iterdir()) if one != file)]

    def opened(self, file: Path, threads: int) -> Run:
        """As ``Runtime.opened``."""
        return _session(str(file), threads)

    def special(self, layer: nn.Module) -> Callable[..., Any] | None:
        """As ``Runtime.special``: recurrent layers."""
        return recurrent_forward(layer)

    def opened_pieces(self, pieces: Sequence[Piece], folder: Path, threads: int) -> list[Run]:
        """As ``Runtime.opened_pieces``."""
        return [_session(one, threads) for one in pieces_as_onnx(pieces)]


def onnx_program(program: Program, goal: str) -> Any:
    """Turn a traced model into an ``ONNXProgram``.

    Raises:
        ExportError: an operator that ONNX has no form for.
    """
    try:
        with _quiet():
            made: Any = torch.onnx.export(program, dynamo=True, verbose=False, optimize=False)
            _tidy(made.model)
    except Exception as problem:
        raise unsupported(program, goal, problem) from problem
    _broadcast_factors(made.model)
    for node in made.model.graph:
        node.metadata_props.clear()  # where each stood in Python, with the paths of this machine
    return made


def pieces_as_onnx(pieces: Sequence[Piece]) -> list[bytes]:
    """Write layers as one graph, for the exporter takes seconds to start, and cut it apart."""
    import onnx
    from onnx.utils import Extractor

    examples = [one.inputs[-1].clone() for one in pieces]  # a shared one would be one input
    free = [{0: torch.export.Dim.AUTO} if len(one) > 1 else {} for one in examples]
    with torch.no_grad():
        program = torch.export.export(
            _Side([one.layer for one in pieces]), (examples,), dynamic_shapes=(free,), strict=False
        )
    whole: Any = onnx_program(program, "ONNX").model_proto
    given = [one.name for one in whole.graph.input]
    made = [one.name for one in whole.graph.output]
    cut = Extractor(whole)
    found = []
    for place in range(len(pieces)):
        part: onnx.ModelProto = cut.extract_model([given[place]], [made[place]])
        found.append(part.SerializeToString())
    return found


class _Side(nn.Module):
    """Layers that stand side by side, each with an input of its own."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        outputs = []
        for layer, x in zip(self.layers, inputs, strict=True):
            y = layer(x)
            outputs.append(y if isinstance(y, Tensor) else y[0])
        return outputs


def _tidy(model: Any) -> None:
    """Simplify the graph; a weight that is built from factors is left to whoever loads the file."""
    from onnxscript import optimizer

    optimizer.optimize(model, input_size_limit=SMALL, output_size_limit=SMALL)


def _broadcast_factors(model: Any) -> None:
    """Let products broadcast a factor that the graph copies for each example.

    In torch a batched product wants equal batches and takes a view of the factor; a runtime would
    make real copies of it.
    """
    import onnx_ir

    for node in model.graph:
        wide = node.inputs[0].producer() if node.op_type == "MatMul" and node.inputs[0] else None
        if wide is None or wide.op_type != "Expand":
            continue
        factor, copied = wide.inputs[0], wide.outputs[0]
        if factor.shape is None or copied.shape is None or len(factor.shape) < 2:
            continue
        if list(factor.shape)[-2:] == list(copied.shape)[-2:]:
            node.replace_input_with(0, factor)
    onnx_ir.passes.common.RemoveUnusedNodesPass()(model)


def _session(model: str | bytes, threads: int) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # it warns of shapes that it infers anew
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        given = {name: one.numpy() for name, one in zip(names, inputs, strict=True)}
        return [torch.from_numpy(one) for one in session.run(None, given)]

    return run


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what the exporter says of its own steps from the user."""
    loggers = [logging.getLogger(one) for one in ("onnx_ir", "onnxscript")]
    before = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, level in zip(loggers, before, strict=True):
            one.setLevel(level)
