"""Every private name of torch that the package touches, each with why nothing public will do; and
where versions of torch differ, from 2.6 on.

No other file may reach for one (tests/test_torch_private.py looks), so a new torch is judged here.
Names that a FILE may hold, in ``pickles/``, are data and no use of theirs.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

# Fake tensors: torch's own way to run a forward by shape alone, without a public home.
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

# The pickle reader of weights_only: it lists names in bytes, and reads parts that are not in files.
from torch._weights_only_unpickler import Unpickler, _get_allowed_globals, get_globals_in_pkl

# What computes with symbolic sizes; ours remembers its results.
from torch.fx.experimental.sym_node import SymNode

# The bases of families of layers: a norm or a convolution of any number of axes, and subclasses.
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.conv import _ConvNd as ConvBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNormBase

# What torch puts on modules that are parametrised or hooked, and so into whole models' files.
from torch.nn.modules.module import _WrappedHook as WrappedHook
from torch.nn.utils import parametrizations, parametrize
from torch.profiler import profile

# Walks nested outputs, named tuples and registered containers included.
from torch.utils._pytree import arg_tree_leaves, tree_leaves, tree_map_only, tree_unflatten

if TYPE_CHECKING:
    import sympy
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

__all__ = [
    "BatchNormBase",
    "ConvBase",
    "DataDependentOutputException",
    "DropoutBase",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GuardOnDataDependentSymNode",
    "InstanceNormBase",
    "ShapeEnv",
    "SymNode",
    "Unpickler",
    "UnsupportedFakeTensorException",
    "WrappedHook",
    "arg_tree_leaves",
    "enable_python_dispatcher",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
]

# Methods of torch's own classes that ours override: an LSTM lets go of weights that it keeps when
# it is moved, and symbolic sizes are not simplified at each question.
OVERRIDDEN = {"_apply": nn.Module, "_maybe_evaluate_static": "ShapeEnv"}
# What logs the problems of a run by shape, which we catch and report.
FAKE_LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
# Operators by which sequences are packed and unpacked: they want lengths as plain numbers.
PACK, UNPACK = "_pack_padded_sequence", "_pad_packed_sequence"
PARAMETRIZATIONS = (
    parametrizations._OrthMaps,
    parametrizations._Orthogonal,
    parametrizations._SpectralNorm,
    parametrizations._WeightNorm,
)


def __getattr__(name: str) -> Any:
    """Import what takes a second to load when it is first asked for: layers alone do not use it."""
    if name in ("GuardOnDataDependentSymNode", "ShapeEnv"):
        from torch.fx.experimental import symbolic_shapes

        return getattr(symbolic_shapes, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def new_symbol(env: ShapeEnv, value: int, name: str) -> sympy.Symbol:
    """Make a symbol that stands for a size; its source only names it."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    found: sympy.Symbol = env.create_symbol(
        value, source=ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC
    )
    return found


def expr_in(node: SymNode) -> sympy.Expr:
    """Return a symbolic number as it was computed; the public ``expr`` substitutes first."""
    return node._expr


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own parameters to read and to exchange, past any ``__setattr__``."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own buffers to read and to exchange, past any ``__setattr__``."""
    return module._buffers


def submodules_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return a module's own children; ``named_children`` wants a module that is whole."""
    return module._modules


def hooks_of(module: nn.Module) -> tuple[dict[int, Callable[..., Any]], ...]:
    """Return what is called before and after a module's forward, and in its backward pass."""
    return (
        *(module._forward_pre_hooks, module._forward_hooks),
        *(module._backward_hooks, module._backward_pre_hooks),
    )


# The hooks of a module that run with its forward and backward, those before its forward first; and
# those that run where its state is written or read.
HOOKS_THAT_RUN = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks"),
    *("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_backward_pre_hooks"),
    *("_backward_hooks", "_is_full_backward_hook"),
)
HOOKS_ON_STATE = (
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def new_backward_hooks(module: nn.Module) -> bool:
    """Return whether a module's backward hooks are of the form that sees inputs and outputs."""
    return bool(module._is_full_backward_hook)


def unsaved_buffers_of(module: nn.Module) -> set[str]:
    """Return the names of the buffers that a module's state leaves out."""
    return module._non_persistent_buffers_set


def has_one_width(attention: nn.MultiheadAttention) -> bool:
    """Return whether queries, keys and values are of one width, and so share one weight."""
    return bool(attention._qkv_same_embed_dim)


def without_fused_path(attention: nn.Module) -> None:
    """Keep torch's fused encoder layer from reading an attention's weights: it asks this first."""
    vars(attention)["_qkv_same_embed_dim"] = False


def forget_compiled(module: nn.Module) -> None:
    """Undo ``module.compile()``, for which there is no public way."""
    module._compiled_call_impl = None


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` has wrapped a module; what it makes has no public class."""
    return isinstance(module, torch._dynamo.OptimizedModule)


# The count of writes to a tensor's memory, which autograd keeps. An expanded layer asks for it, and
# for what is watched, at every call: each name that is looked up on the way costs as much.
version_of: Callable[[Tensor], int] = attrgetter("_version")
_traced = torch.compiler.is_dynamo_compiling  # other compilers trace under a mode
_modes = torch._C._len_torch_dispatch_stack
_tracer = torch._C._get_tracing_state
_transform = torch._C._functorch.peek_interpreter_stack
_casts = torch._C._is_any_autocast_enabled  # in half the time of the public one for a device


def is_watched() -> bool:
    """Return whether something sees each operation that is called, or changes it: a compiler, a
    tracer, fake tensors, a counter, a transform of ``torch.func``, autocast. What it sees has to be
    what a layer computes, from its parameters on."""
    return (
        _traced() or _modes() > 0 or _tracer() is not None or _transform() is not None or _casts()
    )


def tf32_is_allowed() -> bool:
    """Return whether products of float32 may run in TF32 on a CUDA device."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # set by the newer interface, of which this one does not know
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def is_differentiated_plainly(*given: Tensor) -> bool:
    """Return whether only backward differentiates plain tensors of one type: what a compiler, a
    transform, autocast or forward mode would see are operations of torch's, not functions of
    autograd's."""
    if is_watched() or torch.autograd.forward_ad._current_level >= 0:
        return False
    x, *others = given
    if x.device.type != "cpu" and torch.is_autocast_enabled(x.device.type):
        return False
    plain = (Tensor, nn.Parameter)
    return type(x) in plain and all(
        type(one) in plain and one.dtype == x.dtype and one.device == x.device for one in others
    )


def hash_of(flat: Tensor) -> int:
    """Hash the bytes of a tensor of one axis, by torch's own hash where there is one (2.9)."""
    if hasattr(torch, "hash_tensor"):
        return int(torch.hash_tensor(flat.view(torch.uint8) if flat.is_complex() else flat).item())
    return zlib.crc32(flat.view(torch.uint8).cpu().numpy().data)


def storage_id(tensor: Tensor) -> int:
    """Return what is one for all tensors of one memory, on the meta device too, where there is no
    address."""
    return int(tensor.untyped_storage()._cdata)


def address_of(storage: torch.storage.TypedStorage) -> int:
    """Return where a typed storage lies; its public ``untyped`` warns of its own end."""
    return storage._untyped_storage.data_ptr()


def without_view(y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Reshape a contiguous tensor that nothing else holds, without noting that it is a view."""
    own: Tensor = torch.ops.aten._unsafe_view(y, shape)
    return own


def returns_tensor(operator: torch._ops.OpOverload[..., Any]) -> bool:
    """Return whether an operator's schema says that it returns a tensor."""
    return any(one.type.kind() == "TensorType" for one in operator._schema.returns)


def parametrize_anew(module: nn.Module, names: Iterable[str]) -> None:
    """Make a loaded module's class compute tensors again, as ``register_parametrization`` would
    from tensors that are not computed yet."""
    parametrize._inject_new_class(module)
    for name in names:
        parametrize._inject_property(module, name)


def names_beyond_tensors(pickle: Any) -> list[str]:
    """List the names in an open pickle that are not admitted by torch itself; the public function
    takes files of ``torch.save`` only."""
    return sorted(get_globals_in_pkl(pickle) - _get_allowed_globals().keys())


def fills_lists_of_classes() -> bool:
    """Return whether the safe loader fills a list of a class that it does not know itself."""
    return hasattr(Unpickler, "_check_append_target")


def memory_events(run: Callable[[], Any]) -> Iterator[int]:
    """Run what allocates on the CPU; yield in their order the bytes of each step, freed ones below
    zero.

    The public lists of the profiler count by operator, which loses the order.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it complains of absent GPUs on stderr
    with profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    results = seen.profiler.kineto_results if seen.profiler is not None else None
    events = [] if results is None else results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    yield from (event.nbytes() for event in sorted(memory, key=lambda event: event.start_ns()))
