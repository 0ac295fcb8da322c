"""How much memory this process may take."""

from __future__ import annotations

from pathlib import Path

import psutil

_GROUPS = Path("/sys/fs/cgroup")
# By version of control groups: the folder of their tree, and the file that holds a group's limit.
_LIMITS = ((_GROUPS, "memory.max"), (_GROUPS / "memory", "memory.limit_in_bytes"))


def free_memory() -> int:
    """Return the bytes that are free on this machine, or fewer where a control group that holds
    this process, as containers and batch systems set one, has a lower limit."""
    return min([int(psutil.virtual_memory().available), *_limits()])


def _limits() -> list[int]:
    """Return the limits of the control groups above this process, where they have some."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return []
    names = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in lines if line.count(":") > 1}
    found = []
    for (root, file), of in zip(_LIMITS, ("", "memory"), strict=True):
        group = root / names.get(of, "/").lstrip("/")
        for one in (group, *group.parents):
            if one == root or root in one.parents:
                found += _number(one / file)
    return found


def _number(file: Path) -> list[int]:
    try:
        return [int(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError):  # no such file, or "max"
        return []
