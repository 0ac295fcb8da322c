"""Models in files: told apart, read safely, written whole.

The names below are loaded when first used: writing a text file needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from bp_convert.files.atomic import OUTPUT_SUFFIXES, check_output, write_text

if TYPE_CHECKING:
    from bp_convert.files.arch import ARCH_FORMS, arch_factory, gone
    from bp_convert.files.converted import (
        ConvertedFile,
        is_converted,
        needs_trust,
        read_converted,
        save_converted,
        save_dense,
        save_weights,
    )
    from bp_convert.files.entries import fill
    from bp_convert.files.read_model import Loaded, load_model
    from bp_convert.files.reread import read_back
    from bp_convert.files.writable import check_writable

_HOME = {
    "arch": ("ARCH_FORMS", "arch_factory", "gone"),
    "converted": (
        *("ConvertedFile", "is_converted", "needs_trust", "read_converted"),
        *("save_converted", "save_dense", "save_weights"),
    ),
    "entries": ("fill",),
    "read_model": ("Loaded", "load_model"),
    "reread": ("read_back",),
    "writable": ("check_writable",),
}

__all__ = [
    "ARCH_FORMS",
    "OUTPUT_SUFFIXES",
    "ConvertedFile",
    "Loaded",
    "arch_factory",
    "check_output",
    "check_writable",
    "fill",
    "gone",
    "is_converted",
    "load_model",
    "needs_trust",
    "read_back",
    "read_converted",
    "save_converted",
    "save_dense",
    "save_weights",
    "write_text",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOME.items():
        if name in names:
            return getattr(import_module(f"bp_convert.files.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
