"""Folders of image files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from bp_convert.data.dataset import Request
from bp_convert.data.images import Pictures, look_for
from bp_convert.errors import DataError

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff"}) | {
    ".webp"
}


class ImageFolder(Pictures):
    """Image files, of which only the chosen ones are decoded.

    Args:
        request: for a folder of images, or of class subfolders; classes are numbered in the order
            of their names, empty ones included.

    Raises:
        DataError: there is no image, or they lie both in the folder and below it, or deeper.
    """

    threads = 8

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        folder = request.source.path
        self.classes = [one.name for one in _visible(folder) if one.is_dir()]
        flat = _images(folder)
        inside = [(file, i) for i, one in enumerate(self.classes) for file in _images(folder / one)]
        if flat and inside:
            raise _bad_folder(
                self.where,
                f"images both in it and in its subfolder {inside[0][0].parent.name}",
                "move the one or the other away",
            )
        if not flat and not inside:
            deep = next((file for file in folder.rglob("*") if _is_image(file)), None)
            raise _bad_folder(
                self.where,
                "no image" if deep is None else f"images only deeper, such as {deep}",
                "check the path" if deep is None else f"name the folder {deep.parents[1]}",
            )
        self._files = flat or [file for file, _ in inside]
        self._labels = torch.tensor([i for _, i in inside]) if inside else None
        self._look = look_for(request, self._first())

    def __len__(self) -> int:
        return len(self._files)

    def _labels_of(self, rows: Sequence[int]) -> Tensor | None:
        return None if self._labels is None else self._labels[list(rows)]

    def _picture(self, row: int) -> Image.Image:
        return _decoded(self._files[row])

    def _name(self, row: int) -> str:
        return str(self._files[row].relative_to(self._source.path))


def _decoded(path: Path) -> Image.Image:
    with Image.open(path) as image:
        image.load()
        return image


def _visible(folder: Path) -> list[Path]:
    return sorted(one for one in folder.iterdir() if not one.name.startswith("."))


def _images(folder: Path) -> list[Path]:
    return [one for one in _visible(folder) if _is_image(one)]


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.is_file()


def _bad_folder(where: str, found: str, fix: str) -> DataError:
    return DataError(
        where=where,
        found=found,
        allowed=f"images ({', '.join(sorted(SUFFIXES))}) in the folder, or in one subfolder for "
        "each class",
        fix=fix,
    )
