"""Turn a trained PyTorch model into one whose layers are bilinear (Kronecker) projections.

Importing this package does not import torch; the names below are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bp_convert._version import __version__ as __version__

if TYPE_CHECKING:  # The public names, here and nowhere else: what runs reads them from here.
    from bp_convert.attention.attention import BPMultiheadAttention as BPMultiheadAttention
    from bp_convert.data import Examples as Examples
    from bp_convert.data import from_tensors as from_tensors
    from bp_convert.errors import BpConvertError as BpConvertError
    from bp_convert.errors import CheckpointError as CheckpointError
    from bp_convert.errors import DataError as DataError
    from bp_convert.errors import ExportError as ExportError
    from bp_convert.errors import FactorError as FactorError
    from bp_convert.errors import PlanError as PlanError
    from bp_convert.errors import RecipeError as RecipeError
    from bp_convert.errors import TraceError as TraceError
    from bp_convert.errors import TrainingError as TrainingError
    from bp_convert.errors import VerificationError as VerificationError
    from bp_convert.evaluation import Scorer as Scorer
    from bp_convert.experts import BPStack as BPStack
    from bp_convert.exporting import export as export
    from bp_convert.groups.tied_linear import BPTiedLinear as BPTiedLinear
    from bp_convert.layers import BPGRU as BPGRU
    from bp_convert.layers import BPLSTM as BPLSTM
    from bp_convert.layers import BPRNN as BPRNN
    from bp_convert.layers import BPBilinear as BPBilinear
    from bp_convert.layers import BPConv1D as BPConv1D
    from bp_convert.layers import BPConv1d as BPConv1d
    from bp_convert.layers import BPConv2d as BPConv2d
    from bp_convert.layers import BPConv3d as BPConv3d
    from bp_convert.layers import BPConvTranspose1d as BPConvTranspose1d
    from bp_convert.layers import BPConvTranspose2d as BPConvTranspose2d
    from bp_convert.layers import BPConvTranspose3d as BPConvTranspose3d
    from bp_convert.layers import BPEmbedding as BPEmbedding
    from bp_convert.layers import BPEmbeddingBag as BPEmbeddingBag
    from bp_convert.layers import BPGRUCell as BPGRUCell
    from bp_convert.layers import BPLinear as BPLinear
    from bp_convert.layers import BPLSTMCell as BPLSTMCell
    from bp_convert.layers import BPRNNCell as BPRNNCell
    from bp_convert.pipeline import apply as apply
    from bp_convert.pipeline import convert as convert
    from bp_convert.pipeline import inspect as inspect
    from bp_convert.pipeline import open_model as open_model
    from bp_convert.pipeline import plan as plan
    from bp_convert.pipeline import prune as prune
    from bp_convert.running_as import run_as as run_as
    from bp_convert.storage import from_pretrained as from_pretrained
    from bp_convert.storage import load as load
    from bp_convert.storage import plan_of as plan_of
    from bp_convert.storage import read_plan as read_plan
    from bp_convert.storage import save as save
    from bp_convert.storage import store as store
    from bp_convert.storage import to_dense as to_dense
    from bp_convert.storage import to_linears as to_linears
    from bp_convert.storage import write_plan as write_plan
    from bp_convert.studies import probe as probe
    from bp_convert.studies import sweep as sweep
    from bp_convert.training import finetune as finetune
    from bp_convert.tuning import MachineTable as MachineTable
    from bp_convert.tuning import tune as tune
    from bp_convert.values.exported import Export as Export
    from bp_convert.values.factors import FactorSpec as FactorSpec
    from bp_convert.values.plan import Plan as Plan
    from bp_convert.values.report import Report as Report
    from bp_convert.values.settings import LatencyAt as LatencyAt
    from bp_convert.values.settings import LayerRule as LayerRule
    from bp_convert.values.settings import Settings as Settings
    from bp_convert.values.study import Probe as Probe
    from bp_convert.values.study import Sweep as Sweep
    from bp_convert.values.tensors import TensorSpec as TensorSpec
    from bp_convert.values.training import Distill as Distill
    from bp_convert.values.training import Trained as Trained
    from bp_convert.values.training import Training as Training
else:
    import ast
    from importlib import import_module

    _HOMES = {
        name.name: node.module
        for node in ast.walk(ast.parse(__loader__.get_source(__name__)))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("bp_convert.")
        for name in node.names
    }
    __all__ = sorted(_HOMES)

    def __getattr__(name):
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)

    def __dir__():
        return sorted({*globals(), *_HOMES})
