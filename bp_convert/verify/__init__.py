"""A converted model checked by running it, never by reasoning about it."""

from __future__ import annotations

from bp_convert.verify.check import verify
from bp_convert.verify.fingerprint import fingerprint_of_data
from bp_convert.verify.plain_bits import in_plain_bits

__all__ = ["fingerprint_of_data", "in_plain_bits", "verify"]
