"""Where a model's own tokenizer lies."""

from __future__ import annotations

from pathlib import Path

FILES = ("tokenizer.json", "tokenizer_config.json")


def tokenizer_in(model: str | Path | None, arch: str | None) -> Path | None:
    """Return the folder beside a model, or of its architecture, that holds its tokenizer."""
    places = [] if model is None else [Path(model)]
    if arch is not None and arch.startswith("transformers:"):
        places.append(Path(arch.partition("?")[0].partition(":")[2]))
    for place in places:
        folder = place if place.is_dir() else place.parent
        if any((folder / name).is_file() for name in FILES):
            return folder
    return None
