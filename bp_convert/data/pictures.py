"""Rows that are images: read in batches, and the broken ones named or left out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from PIL import Image
from torch import Tensor

from bp_convert.data.dataset import Item, Rows
from bp_convert.data.images import Look
from bp_convert.data.locator import Locator
from bp_convert.errors import DataError

OPTIONS = ("mean", "std", "broken")
NAMED = 8  # broken images that an error names
PATIENCE = 30.0  # seconds that are spent on finding more of them


class Pictures(Rows):
    """A source of images.

    Args:
        source: with the option ``broken``: ``stop``, or ``skip`` to look at every image once and
            leave the broken ones out.
        options: that it may have.
    """

    threads = 1  # that may look for broken images at a time
    _look: Look

    def __init__(self, source: Locator, options: Sequence[str] = OPTIONS) -> None:
        source.admit(options)
        self._source, self.where = source, source.where
        self._skips = source.options.get("broken", "stop") == "skip"
        if source.options.get("broken", "skip") not in ("stop", "skip"):
            raise source.bad(
                f"broken={source.options['broken']}",
                "broken=stop or broken=skip",
                "write broken=skip to leave broken images out",
            )

    def __getitems__(self, rows: Sequence[int]) -> Item:
        """Decode some images as one batch.

        Raises:
            DataError: some of them are broken; it names all that are.
        """
        tensors = [self._look.tensor(one) for one in self._whole(rows)]
        return *self._look.batch(tensors), self._labels_of(rows)

    # What each source says of its images

    def _labels_of(self, rows: Sequence[int]) -> Tensor | None:
        """Return class numbers, or None where there are none."""
        raise NotImplementedError

    def _picture(self, row: int) -> Image.Image:
        """Decode an image; whatever the decoder raises comes through."""
        raise NotImplementedError

    def _name(self, row: int) -> str:
        return f"image {row}"

    # The broken ones

    def _first(self) -> Image.Image:
        """Return the first image that can be read, once it is known which are to be left out.

        Raises:
            DataError: the first is broken and none is to be left out, or all are broken.
        """
        if self._skips:
            with ThreadPoolExecutor(self.threads) as pool:
                problems = enumerate(pool.map(self._problem, range(len(self))))
                self.broken = frozenset(row for row, problem in problems if problem is not None)
        return self._whole([next((n for n in range(len(self)) if n not in self.broken), 0)])[0]

    def _whole(self, rows: Sequence[int]) -> list[Image.Image]:
        try:
            return [self._picture(row) for row in rows]
        except DataError:
            raise
        except Exception as problem:
            raise self._unreadable(rows, problem) from problem

    def _problem(self, row: int) -> Exception | None:
        try:
            self._picture(row)
        except DataError:
            raise
        except Exception as problem:  # decoders raise of every kind, SyntaxError included
            return problem
        return None

    def _unreadable(self, first: Sequence[int], problem: Exception) -> DataError:
        """Name all broken images, those of ``first`` and, as far as time allows, the others."""
        end = time.monotonic() + PATIENCE
        found: list[int] = []
        rest = (row for row in range(len(self)) if row not in set(first))
        late = False
        for row in (*first, *rest):
            if found and (late := time.monotonic() > end):
                break
            if self._problem(row) is not None:
                found.append(row)
        names = ", ".join(self._name(row) for row in sorted(found)[:NAMED])
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        least = "at least " if late else ""
        text = self._source.text
        option = f"{text}{'&' if self._source.options else '?'}broken=skip"
        them = "it" if len(found) == 1 else "them"
        fix = f"mend or remove {them}, or leave broken images out: {option}"
        return self._source.bad(
            f"{least}{len(found):,} of {len(self):,} images cannot be read: {names}{more} "
            f"(such as {type(problem).__name__}: {problem})",
            "whole images",
            "there is no other image" if self._skips else fix,
        )
