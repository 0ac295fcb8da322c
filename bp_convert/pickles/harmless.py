"""The names besides nn.Module classes that a model file may use, each with what it stands for.

Nothing else is imported for them: a name is looked up here and nowhere else.
"""

from __future__ import annotations

import argparse
import builtins
import collections
import datetime
import functools
import logging
import pathlib
import random
import re
import types
import uuid
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import (
    SpectralNorm,
    SpectralNormLoadStateDictPreHook,
    SpectralNormStateDictHook,
)
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import get_overridable_functions
from torch.utils.hooks import RemovableHandle

from bp_convert.hub.marked import Refusing, refuse
from bp_convert.kron.conv_layout import Layout
from bp_convert.pickles import rebuilt
from bp_convert.pickles.reach import Reach, VariableFunctions
from bp_convert.torch_private import PARAMETRIZATIONS, WrappedHook
from bp_convert.values.factors import FactorSpec

_BUILTINS = (
    "Ellipsis NotImplemented bool bytes dict float frozenset int list object slice str tuple"
)
# Those of F that are not functions of torch.nn.functional itself, or once were.
_ACTIVATIONS = "gelu hardsigmoid hardswish logsigmoid sigmoid softplus tanh"
LONGEST = 10**6  # numbers in a range
# torchvision's detectors keep these: thresholds, and box arithmetic on tensors. torchvision takes
# seconds to import, so what a name stands for is looked up when a file uses it.
OF_TORCHVISION = (
    "torchvision.models.detection._utils.BalancedPositiveNegativeSampler",
    "torchvision.models.detection._utils.BoxCoder",
    "torchvision.models.detection._utils.BoxLinearCoder",
    "torchvision.models.detection._utils.Matcher",
    "torchvision.models.detection._utils.SSDMatcher",
    "torchvision.models.optical_flow.raft._pass_through_h",
    "torchvision.ops.boxes.box_iou",
)


def _functions(home: Any) -> dict[str, Callable[..., Any]]:
    """Return the functions of tensors that a module of torch offers, by the names of pickles."""
    found = {
        f"{one.__module__}.{one.__name__}": one
        for one in get_overridable_functions()[home]
        if not one.__name__.startswith("_")
    }
    homes = (home.__name__, "torch._C._nn", "torch._C._fft")
    return {name: one for name, one in found.items() if name.rpartition(".")[0] in homes}


def _class_of(value: object) -> type:
    """Stand for type, which pickles call with one argument: type(None). With three it makes."""
    return value.__class__


def _range(*ends: int) -> range:
    """Stand for range; what a file makes a list of is not to fill the memory."""
    made = range(*ends)
    if len(made) > LONGEST:
        raise ValueError(f"a range of {len(made)} numbers")
    return made


def _is_pruning(thing: object) -> bool:
    return isinstance(thing, type) and issubclass(thing, prune.BasePruningMethod)


def _named(*things: Any) -> dict[str, object]:
    return {f"{one.__module__}.{one.__qualname__}": one for one in things}


HARMLESS: dict[str, object] = {
    # Functions of tensors that models keep as attributes, such as self.act = F.relu.
    **_functions(F),
    **_functions(torch.fft),
    **{f"torch.nn.functional.{name}": getattr(F, name) for name in _ACTIVATIONS.split()},
    "torch._C._VariableFunctionsClass": VariableFunctions,
    "builtins.getattr": Reach(),  # never getattr itself
    # Holds a class and its arguments (vision transformers keep their norm so). It is not called
    # at load, and can only hold what is admitted.
    **_named(functools.partial),
    # Plain values that models keep: settings, dates, paths. The paths are pure, which is to say
    # words: they cannot touch a file.
    **_named(argparse.Namespace, types.SimpleNamespace),
    **_named(datetime.date, datetime.datetime, datetime.timedelta),
    "pathlib.Path": pathlib.PurePath,
    "pathlib.PosixPath": pathlib.PurePosixPath,
    "pathlib.WindowsPath": pathlib.PureWindowsPath,
    "pathlib.PurePosixPath": pathlib.PurePosixPath,
    "pathlib.PureWindowsPath": pathlib.PureWindowsPath,
    "pathlib._local.PosixPath": pathlib.PurePosixPath,  # the home of the same in Python 3.13
    "pathlib._local.WindowsPath": pathlib.PureWindowsPath,
    # Plain values and containers of Python.
    **{f"builtins.{name}": getattr(builtins, name) for name in _BUILTINS.split()},
    "builtins.range": _range,
    "builtins.type": _class_of,
    **_named(collections.defaultdict, collections.deque, random.Random, uuid.UUID),
    **_named(logging.getLogger),  # finds or makes a named logger; writes nothing
    "re._compile": re.compile,
    # What torch puts on modules: it is called when the module runs, and acts on its tensors.
    **_named(WrappedHook, RemovableHandle, WeightNorm, SpectralNorm),
    **_named(SpectralNormStateDictHook, SpectralNormLoadStateDictPreHook),
    **_named(*(one for one in vars(prune).values() if _is_pruning(one))),
    **_named(parametrize.ParametrizationList, *PARAMETRIZATIONS),
    # What our own files are written with.
    **_named(rebuilt.array, rebuilt.dtype, rebuilt.filled, rebuilt.generator, rebuilt.plain),
    **_named(rebuilt.memory_format),
    **_named(rebuilt.scalar, rebuilt.scalar_type, rebuilt.Parametrized),
    "bp_convert.hub.marked.SavePretrained": Refusing,
    **_named(refuse),
    "bp_convert.pickles.guard.refuse": refuse,  # where it once stood
    # Our layers' factor pairs and channel shares: frozen values of integers.
    **_named(Layout, FactorSpec),
}
