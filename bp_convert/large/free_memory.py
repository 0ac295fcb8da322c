"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

import psutil

_GROUPS = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Return the bytes that are free: of the machine, or of the control group that holds this
    process, as containers and batch systems set one."""
    return min([int(psutil.virtual_memory().available), *_left_in_groups()])


def _left_in_groups() -> list[int]:
    """Return what each control group above this process has left, where it has a limit."""
    found = []
    try:
        line = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()[-1]
        group = _GROUPS / line.rpartition(":")[2].lstrip("/")
        while group == _GROUPS or _GROUPS in group.parents:
            if (group / "memory.max").is_file():
                limit = (group / "memory.max").read_text(encoding="utf-8").strip()
                used = int((group / "memory.current").read_text(encoding="utf-8"))
                if limit != "max":
                    found.append(max(int(limit) - used, 0))
            group = group.parent
    except (OSError, ValueError, IndexError):  # no Linux, or an older one
        pass
    return found
