"""All architectures of the zoo, by name."""

from __future__ import annotations

from fnmatch import fnmatch
from importlib import import_module

from benchmarks.zoo.entry import Entry

HOMES = (
    "torchvision_models",
    "timm_models",
    "transformers_models",
    "own_sequences",
    "own_pictures",
    "own_paths",
    "own_state",
    "own_calls",
    "own_tasks",
)


def zoo() -> dict[str, Entry]:
    """Return every architecture by its name; no library is imported but torchvision."""
    found: dict[str, Entry] = {}
    for home in HOMES:
        for entry in import_module(f"benchmarks.zoo.{home}").ENTRIES:
            if entry.name in found:
                raise ValueError(f"two architectures are called {entry.name}")
            found[entry.name] = entry
    return found


def chosen(patterns: list[str]) -> list[Entry]:
    """Return the architectures that a pattern fits, or that have it in their name; all for none."""
    entries = list(zoo().values())
    if not patterns:
        return entries
    return [one for one in entries if any(fnmatch(one.name, p) or p in one.name for p in patterns)]
