"""The targets by name."""

from __future__ import annotations

from collections.abc import Mapping

from bp_convert.exporting.executorch_file import ExecutorchRuntime
from bp_convert.exporting.onnx_file import OnnxRuntime
from bp_convert.exporting.openvino_file import OpenvinoRuntime
from bp_convert.exporting.runtime import Runtime
from bp_convert.exporting.torch_file import TorchRuntime
from bp_convert.values.literals import Goal

RUNTIMES: Mapping[Goal, Runtime] = {
    one.goal: one for one in (OnnxRuntime(), OpenvinoRuntime(), ExecutorchRuntime(), TorchRuntime())
}
