"""Segments that are done, kept on disk, so that a run that was killed does not do them again."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bp_convert.graph.clone import all_weights
from bp_convert.search.cache import cache_folder, key_of, words_of
from bp_convert.values.reconstruction import BlockResult

LIMIT = 2 << 30  # bytes that are kept
FORM = 1  # of what is kept and how it is computed: a change makes old files unused


class Done:
    """What is done of one reconstruction; a folder that cannot be written to is no error.

    Args:
        source, converted: the models it starts from.
        words: all else that the result depends on.
    """

    def __init__(self, source: nn.Module, converted: nn.Module, *words: str) -> None:
        weights = [one for model in (source, converted) for one in all_weights(model).values()]
        self.key = key_of(weights, str(FORM), *map(words_of, (source, converted)), *words)
        self.folder = cache_folder().parent / "blocks"

    def read(self, number: int) -> tuple[BlockResult, dict[str, Tensor]] | None:
        """Return what became of a segment, and its weights by name; None where it is not done."""
        path = self._path(number)
        try:
            with safe_open(path, framework="pt") as opened:
                result = BlockResult.model_validate_json(opened.metadata()["result"])
                found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except Exception:  # not there, or damaged in whatever way: it is done again
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # what was used last is kept longest
        return result, found

    def write(self, number: int, result: BlockResult, weights: Mapping[str, Tensor]) -> None:
        """Keep what became of a segment."""
        held = {name: one.detach().cpu().contiguous() for name, one in weights.items()}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _trim(self.folder, sum(one.nbytes for one in held.values()))
            with tempfile.TemporaryDirectory(dir=self.folder) as work:
                path = Path(work) / "block.safetensors"
                save_file(held, path, metadata={"result": result.model_dump_json()})
                path.replace(self._path(number))
        except OSError:
            return

    def _path(self, number: int) -> Path:
        return self.folder / f"{self.key}-{number}.safetensors"


def _trim(folder: Path, more: int) -> None:
    """Remove what was not used for longest, so that there is room for some bytes more."""
    held = more
    found: Sequence[tuple[os.stat_result, str]] = [
        (entry.stat(), entry.path) for entry in os.scandir(folder) if entry.is_file()
    ]
    for facts, path in sorted(found, key=lambda one: one[0].st_mtime, reverse=True):
        held += facts.st_size
        if held > LIMIT:
            Path(path).unlink(missing_ok=True)
