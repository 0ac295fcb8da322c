"""How objects are pickled so that the safe loader can read them; a pickle module for torch.save.

torch's weights-only unpickler takes a small set of operations and fills plain dictionaries and
lists only. What pickles otherwise, or not at all, is written here in a form that it takes:

* numpy arrays and numbers, and generators of random ones, as their bytes;
* containers of other classes as one call that makes and fills them;
* parametrized modules, which torch refuses to pickle, as their class and state;
* compiled modules as the module that was compiled;
* slices without the storage that they lie in;
* modules without the hooks that their library puts on again by itself.
"""

from __future__ import annotations

import copyreg
import pickle
from collections import OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from bp_convert.pickles import rebuilt
from bp_convert.pickles.libraries import without_library_hooks
from bp_convert.torch_private import is_compiled

Place = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]


class Pickler(pickle.Pickler):
    """Pickles as above; torch.save adds how storages are written."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._compact: dict[Place, Tensor] = {}

    def reducer_override(self, thing: Any) -> Any:
        """Return how to make ``thing`` again, or NotImplemented for pickle's own way."""
        if isinstance(thing, Tensor):
            return self._tensor(thing)
        if isinstance(thing, nn.Module):
            return _module(thing)
        if isinstance(thing, np.ndarray) and type(thing) is np.ndarray:
            return _array(rebuilt.array, thing)
        if isinstance(thing, np.generic):
            return _array(rebuilt.scalar, np.asarray(thing))
        if isinstance(thing, np.dtype):
            return (rebuilt.dtype, (thing.str,)) if _is_plain(thing) else NotImplemented
        if isinstance(thing, type):
            return _class(thing)
        if isinstance(thing, torch.Generator) and thing.device.type == "cpu":
            return rebuilt.generator, (thing.get_state(),)
        if isinstance(thing, torch.memory_format):
            return rebuilt.memory_format, (str(thing),)
        if isinstance(thing, dict | list | deque) and type(thing) is not OrderedDict:
            return _container(thing)
        return NotImplemented

    def _tensor(self, tensor: Tensor) -> Any:
        if not _is_slice(tensor):
            return NotImplemented
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        own = self._compact.get(place)
        if own is None:
            own = tensor.detach().clone(memory_format=torch.contiguous_format)
            self._compact[place] = own  # what shares a place shares it in the file, too
        if isinstance(tensor, nn.Parameter):
            shown: Tensor = nn.Parameter(own, requires_grad=tensor.requires_grad)
        else:
            shown = own.view(own.shape).requires_grad_(tensor.requires_grad)
        shown.__dict__.update(tensor.__dict__)
        return _plainly(shown)


def _is_slice(tensor: Tensor) -> bool:
    """Tell whether torch.save would write more than the tensor: the whole of its storage."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    )


def _module(module: nn.Module) -> Any:
    compiled = vars(module).get("_modules", {}).get("_orig_mod")
    if isinstance(compiled, nn.Module) and is_compiled(module):
        return rebuilt.plain, (compiled,)
    changed = without_library_hooks(module)
    if parametrize.is_parametrized(module):
        kind: Any = type(module).__mro__[1]  # without what torch has injected
        return rebuilt.Parametrized, (), (kind, {**kind.__getstate__(module), **changed})
    if not changed:
        return NotImplemented
    maker, arguments, state, *rest = _plainly(module)
    return (maker, arguments, {**state, **changed}, *rest)


def _plainly(thing: Any) -> Any:
    """Reduce as pickle would."""
    return thing.__reduce_ex__(2)


def _container(thing: Any) -> Any:
    """Reduce a dictionary, list or queue of another class than the plain ones."""
    maker, arguments, state, items, pairs = (*_plainly(thing), None, None, None)[:5]
    if items is None and pairs is None and not isinstance(thing, deque | defaultdict):
        return NotImplemented  # it says itself how it is made
    called = maker is type(thing)
    if not called and maker is not copyreg.__newobj__:  # type: ignore[attr-defined]
        return NotImplemented
    kind, *arguments = (maker, *arguments) if called else arguments
    made = (kind, tuple(arguments), list(items or ()), dict(pairs or ()), called)
    return rebuilt.filled, made, state


def _array(maker: Any, values: np.ndarray[Any, Any]) -> Any:
    if not _is_plain(values.dtype):
        return NotImplemented
    content = torch.from_numpy(np.frombuffer(values.tobytes(), np.uint8).copy())
    return maker, (content, values.dtype.str, tuple(values.shape))


def _is_plain(kind: np.dtype[Any]) -> bool:
    return kind.kind in rebuilt.ARRAY_KINDS and not kind.shape


def _class(kind: type) -> Any:
    if issubclass(kind, np.generic) and kind.__module__ == "numpy" and kind is not np.generic:
        try:
            plain = np.dtype(kind)
        except TypeError:
            return NotImplemented
        if plain.type is kind and _is_plain(plain):
            return rebuilt.scalar_type, (plain.str,)
    return NotImplemented
