"""How work tells of its progress."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # words, steps done, and their number
