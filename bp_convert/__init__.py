"""Turn a trained PyTorch model into one whose layers are bilinear (Kronecker) projections.

Importing this package does not import torch; the names below are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bp_convert._version import __version__

if TYPE_CHECKING:
    from bp_convert.errors import (
        BpConvertError,
        CheckpointError,
        DataError,
        FactorError,
        PlanError,
        RecipeError,
        TraceError,
        TrainingError,
        VerificationError,
    )
    from bp_convert.layers import BPLSTM, BPConv1d, BPConv2d, BPConv3d, BPEmbedding, BPLinear
    from bp_convert.pipeline import (
        apply,
        convert,
        inspect,
        load,
        open_model,
        plan,
        read_plan,
        save,
        to_dense,
        write_plan,
    )
    from bp_convert.training import finetune
    from bp_convert.values.factors import FactorSpec
    from bp_convert.values.plan import Plan
    from bp_convert.values.report import Report
    from bp_convert.values.settings import LayerRule, Settings
    from bp_convert.values.tensors import TensorSpec
    from bp_convert.values.training import Distill, Trained, Training

_HOME = {
    "BPConv1d": "layers",
    "BPConv2d": "layers",
    "BPConv3d": "layers",
    "BPEmbedding": "layers",
    "BPLSTM": "layers",
    "BPLinear": "layers",
    "BpConvertError": "errors",
    "CheckpointError": "errors",
    "DataError": "errors",
    "Distill": "values.training",
    "FactorError": "errors",
    "FactorSpec": "values.factors",
    "LayerRule": "values.settings",
    "Plan": "values.plan",
    "PlanError": "errors",
    "RecipeError": "errors",
    "Report": "values.report",
    "Settings": "values.settings",
    "TensorSpec": "values.tensors",
    "TraceError": "errors",
    "Trained": "values.training",
    "Training": "values.training",
    "TrainingError": "errors",
    "VerificationError": "errors",
    "apply": "pipeline",
    "convert": "pipeline",
    "finetune": "training",
    "inspect": "pipeline",
    "load": "pipeline",
    "open_model": "pipeline",
    "plan": "pipeline",
    "read_plan": "pipeline",
    "save": "pipeline",
    "to_dense": "pipeline",
    "write_plan": "pipeline",
}

__all__ = [
    "BPLSTM",
    "BPConv1d",
    "BPConv2d",
    "BPConv3d",
    "BPEmbedding",
    "BPLinear",
    "BpConvertError",
    "CheckpointError",
    "DataError",
    "Distill",
    "FactorError",
    "FactorSpec",
    "LayerRule",
    "Plan",
    "PlanError",
    "RecipeError",
    "Report",
    "Settings",
    "TensorSpec",
    "TraceError",
    "Trained",
    "Training",
    "TrainingError",
    "VerificationError",
    "__version__",
    "apply",
    "convert",
    "finetune",
    "inspect",
    "load",
    "open_model",
    "plan",
    "read_plan",
    "save",
    "to_dense",
    "write_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"bp_convert.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
