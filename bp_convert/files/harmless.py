"""The names besides nn.Module classes that a model file may use, each with what it stands for.

Nothing is imported for them: a name is looked up here and nowhere else.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import pathlib
import pickle
import types

import torch
from torch.nn import functional as F
from torchvision.models.detection import _utils as detection
from torchvision.models.optical_flow import raft
from torchvision.ops import boxes

from bp_convert.kron.conv_layout import Layout
from bp_convert.values.factors import FactorSpec

# Functions of tensors that models keep as attributes, such as self.act = torch.relu.
_FUNCTIONALS = """celu elu gelu glu hardsigmoid hardswish hardtanh leaky_relu log_softmax logsigmoid
mish relu relu6 rrelu selu sigmoid silu softmax softmin softplus softsign tanh tanhshrink"""
_BUILT_IN = "abs celu erf exp log_softmax relu rrelu selu sigmoid sin softmax sqrt square tanh"


class _VariableFunctions:
    """Stands for torch._C._VariableFunctionsClass, of which only activations are wanted."""


def _torch_function(owner: object, name: object) -> object:
    """Stand for getattr: give out torch's activation functions and nothing else.

    torch's built-in functions pickle as getattr(torch._C._VariableFunctionsClass, name).
    """
    if owner is _VariableFunctions and name in _BUILT_IN.split():
        return getattr(torch, str(name))
    raise pickle.UnpicklingError(f"getattr({owner!r}, {name!r}) is not an activation of torch")


HARMLESS: dict[str, object] = {
    # Activation functions: pure functions of tensors.
    **{f"torch.nn.functional.{name}": getattr(F, name) for name in _FUNCTIONALS.split()},
    "torch._C._nn.gelu": F.gelu,
    "torch._C._nn.softplus": F.softplus,
    "torch._C._nn.log_sigmoid": F.logsigmoid,
    "torch._C._VariableFunctionsClass": _VariableFunctions,
    "builtins.getattr": _torch_function,  # never getattr itself
    # Holds a class and its arguments (vision transformers keep their norm so). It is not called
    # at load, and can only hold what is admitted.
    "functools.partial": functools.partial,
    # Plain values that models keep: settings, dates, paths. The paths are pure, which is to say
    # words: they cannot touch a file.
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
    "datetime.date": datetime.date,
    "datetime.datetime": datetime.datetime,
    "datetime.timedelta": datetime.timedelta,
    "pathlib.Path": pathlib.PurePath,
    "pathlib.PosixPath": pathlib.PurePosixPath,
    "pathlib.WindowsPath": pathlib.PureWindowsPath,
    "pathlib.PurePosixPath": pathlib.PurePosixPath,
    "pathlib.PureWindowsPath": pathlib.PureWindowsPath,
    "pathlib._local.PosixPath": pathlib.PurePosixPath,  # the home of the same in Python 3.13
    "pathlib._local.WindowsPath": pathlib.PureWindowsPath,
    # torchvision's detectors keep these: thresholds, and box arithmetic on tensors.
    **{
        f"torchvision.models.detection._utils.{kind.__name__}": kind
        for kind in (
            detection.BalancedPositiveNegativeSampler,
            detection.BoxCoder,
            detection.BoxLinearCoder,
            detection.Matcher,
            detection.SSDMatcher,
        )
    },
    "torchvision.ops.boxes.box_iou": boxes.box_iou,
    "torchvision.models.optical_flow.raft._pass_through_h": raft._pass_through_h,
    # Our layers' factor pairs and channel shares: frozen values of integers.
    "bp_convert.kron.conv_layout.Layout": Layout,
    "bp_convert.values.factors.FactorSpec": FactorSpec,
}
