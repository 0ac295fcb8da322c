"""Models written for other runtimes, run there, and compared with their dense export."""

from __future__ import annotations

from bp_convert.exporting.exporter import export

__all__ = ["export"]
