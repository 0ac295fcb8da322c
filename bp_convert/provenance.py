"""Where a result comes from: the machine, and the versions of what made it."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bp_convert._version import __version__

PACKAGES = ("torch", "torchvision")


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Return the versions of bp-convert, Python and those packages that are installed."""
    import importlib.metadata

    found = {"bp-convert": __version__, "python": platform.python_version()}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> str:
    """Name the CPU, the threads that torch takes, the system, and GPUs that are in use."""
    torch: Any = sys.modules.get("torch")
    threads = os.cpu_count() if torch is None else torch.get_num_threads()
    said = "1 thread" if threads == 1 else f"{threads} threads"
    return ", ".join((cpu_name(), said, f"{platform.system()} {platform.machine()}", *devices()))


def cpu_name() -> str:
    """Name the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):  # not Linux
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or "CPU"


def devices() -> list[str]:
    """Name the GPUs, if torch has been asked for one."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    return [torch.cuda.get_device_name(one) for one in range(torch.cuda.device_count())]
