"""Models in files: told apart, read safely, written whole."""

from __future__ import annotations

from bp_convert.files.arch import ARCH_FORMS, arch_factory
from bp_convert.files.atomic import check_output, write_text
from bp_convert.files.converted import (
    OUTPUT_SUFFIXES,
    Converted,
    is_converted,
    needs_trust,
    read_converted,
    save_converted,
    save_dense,
)
from bp_convert.files.load import Loaded, load_model
from bp_convert.files.tensors import fill

__all__ = [
    "ARCH_FORMS",
    "OUTPUT_SUFFIXES",
    "Converted",
    "Loaded",
    "arch_factory",
    "check_output",
    "fill",
    "is_converted",
    "load_model",
    "needs_trust",
    "read_converted",
    "save_converted",
    "save_dense",
    "write_text",
]
