"""torchvision's data sets by name, from files that are there already."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision import datasets

from bp_convert.data.dataset import Request
from bp_convert.data.images import OPTIONS, Pictures, look_for
from bp_convert.errors import DataError

ROOT = "data"
# Mean and deviation of each channel over the training images, as the paper normalises its inputs
NORMS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "MNIST": ((0.1307,), (0.3081,)),
    "FashionMNIST": ((0.2860,), (0.3530,)),
    "CIFAR10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "CIFAR100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "SVHN": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
}
_OTHER_FORMS = {"DatasetFolder", "ImageFolder", "VisionDataset"}  # these have no name of their own


def names() -> list[str]:
    """Return the names of torchvision's data sets that read files below a root folder."""
    return [
        name
        for name in datasets.__all__
        if name not in _OTHER_FORMS and "root" in _parameters(getattr(datasets, name))
    ]


def _parameters(kind: Any) -> list[str]:
    return list(inspect.signature(kind).parameters)


class VisionSet(Pictures):
    """A torchvision data set of images.

    Args:
        request: for its name, with the options ``root`` (the folder that its files lie in, by
            default ``data``), ``mean`` and ``std``; without these, the set's own in ``NORMS``.

    Raises:
        DataError: the files are not there, or the set is not one of images.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request, ("root", *OPTIONS))
        source, part = request.source, request.part
        root = Path(source.options.get("root", ROOT)).expanduser()
        kind: Any = getattr(datasets, source.name)
        if source.name in {"EMNIST", "QMNIST", "PhotoTour"}:  # their split is another thing
            raise self._bad("a data set with options of its own", "give it as FILE.py:LOADER")
        known = _parameters(kind)
        options: dict[str, Any] = {"download": request.download} if "download" in known else {}
        tries: list[dict[str, Any]] = [{}]
        if "train" in known:
            tries = [{"train": part == "train"}]
        elif "split" in known:
            words = ["train"] if part == "train" else ["test", "val", "valid"]
            tries = [{"split": word} for word in words]
        self.split = part if tries[0] else ""
        for attempt in tries:
            try:
                self._data: Any = kind(root, **options, **attempt)
                break
            except Exception as problem:  # each set has its own way to say that files are missing
                if isinstance(problem, ValueError) and attempt is not tries[-1]:
                    continue
                raise self._missing(kind, source.name, root, problem) from problem
        self._look = look_for(request, self._first(), NORMS.get(source.name))

    def __len__(self) -> int:
        return len(self._data)

    def _labels_of(self, rows: Sequence[int]) -> Tensor | None:
        known = getattr(self._data, "targets", None)
        if known is None or len(known) != len(self._data):
            known = getattr(self._data, "_labels", None)  # where newer sets keep them
        found = [known[row] if known is not None else self._data[row][1] for row in rows]
        try:
            return torch.tensor([int(one) for one in found])
        except (TypeError, ValueError):
            return None

    def _picture(self, row: int) -> Image.Image:
        image = self._data[row][0]
        if not isinstance(image, Image.Image):
            raise self._bad(f"a {type(image).__name__} as example", "give it as FILE.py:LOADER")
        return image

    def _bad(self, found: str, fix: str) -> DataError:
        return self._source.bad(found, "a data set of images", fix)

    def _missing(self, kind: Any, name: str, root: Path, problem: Exception) -> DataError:
        inside = getattr(kind, "base_folder", None)
        if issubclass(kind, datasets.MNIST):
            inside = f"{name}/raw"
        home = root / inside if isinstance(inside, str) else root
        text = str(problem).splitlines() or ["no message"]
        return self._source.bad(
            f"torchvision cannot read it: {type(problem).__name__}: {text[0]}",
            f"its files, unpacked, in {home}; nothing is downloaded",
            f"put them there, or name the folder: {name}?root=FOLDER",
        )
