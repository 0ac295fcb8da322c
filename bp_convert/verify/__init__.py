"""A converted model checked by running it, never by reasoning about it."""

from __future__ import annotations

from bp_convert.verify.check import verify
from bp_convert.verify.fingerprint import fingerprint_of_data

__all__ = ["fingerprint_of_data", "verify"]
