"""The method of finding factors that a plan goes by."""

from __future__ import annotations

from bp_convert.errors import PlanError
from bp_convert.values.literals import Method


def settled(method: Method, *, data: bool) -> Method:
    """Return the method that ``auto`` stands for.

    Raises:
        PlanError: a method that needs data, without any.
    """
    if method == "auto":
        return "kron-data" if data else "kron"
    if method.endswith("-data") and not data:
        raise PlanError(
            where=f"method {method}",
            found="no calibration data",
            allowed="svd or kron where there is no data",
            fix="give examples with --calibrate, or another --method",
        )
    return method
