"""Images: scaled to cover the model's input, cropped at the centre, normalised; read in batches,
and the broken ones named or left out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from bp_convert.data.dataset import Batch, Item, Request, Rows
from bp_convert.errors import DataError

# torchvision's normalisation of ImageNet, which its weights and most of timm's expect
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
NUMBERS = ("mean", "std")
OPTIONS = ("mean", "std", "broken")
NAMED = 8  # broken images that an error names
PATIENCE = 30.0  # seconds that are spent on finding more of them


@dataclass(frozen=True)
class Look:
    """How an image becomes a tensor.

    Attributes:
        shape: channels (1 or 3), height, width.
        mean: subtracted from values in [0, 1]; one a channel.
        std: divides them then.
        name: keyword of forward, or None for a positional argument.
    """

    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    name: str | None = None

    def tensor(self, image: Image.Image) -> Tensor:
        """Return (C, H, W), float32: the image's centre, as large as fits."""
        channels, height, width = self.shape
        if "transparency" in image.info:
            image = image.convert("RGBA")  # PIL warns where it goes to RGB at once
        sixteen = image.mode.startswith("I")  # convert("L") would cut these off at 255
        mode = "F" if sixteen else "L" if channels == 1 else "RGB"
        image = ImageOps.exif_transpose(image).convert(mode)
        image = ImageOps.fit(image, (width, height), method=Image.Resampling.BILINEAR)
        values = torch.from_numpy(np.array(image, dtype=np.float32))
        values = values / (65535 if sixteen else 255)
        if values.dim() == 2:
            values = values[..., None].expand(height, width, channels)  # (H, W) -> (H, W, C)
        mean, std = torch.tensor(self.mean), torch.tensor(self.std)
        return ((values - mean) / std).permute(2, 0, 1).contiguous()  # (H, W, C) -> (C, H, W)

    def batch(self, images: Sequence[Tensor]) -> Batch:
        """Stack images into one batch, (N, C, H, W)."""
        stacked = torch.stack(list(images))
        return ((stacked,), {}) if self.name is None else ((), {self.name: stacked})


def look_for(
    request: Request,
    first: Image.Image,
    own: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
) -> Look:
    """Decide how images become tensors.

    Args:
        request: the options ``mean`` and ``std`` of its source replace the usual normalisation:
            ImageNet's for 3 channels, none for 1. Without inputs of the model, the first image's
            own size and colours count.
        first: an image of the source.
        own: the source's usual normalisation, where it has one.

    Raises:
        DataError: the model takes no image, or the normalisation does not fit its channels.
    """
    source, specs = request.source, request.specs
    if len(specs) > 1 or (specs and (len(specs[0].shape) != 3 or "float" not in specs[0].dtype)):
        raise source.bad(
            "images",
            f"what the model takes: {' and '.join(str(spec) for spec in specs)}",
            "give the data as a .npz file with one array for each input",
        )
    grey = first.mode in {"1", "L", "LA", "F"} or first.mode.startswith("I")
    shape = (1 if grey else 3, first.height, first.width)
    channels, height, width = specs[0].shape if specs else shape
    if channels not in {1, 3}:
        raise source.bad(
            "images of 1 or 3 channels",
            f"{channels} channels, as the model's input {specs[0]} has",
            "give the data as a .npy array of that shape",
        )
    usual: tuple[tuple[float, ...], tuple[float, ...]] = ((0.0,), (1.0,))
    if channels == 3:
        usual = IMAGENET
    if own is not None:
        usual = own
        if len(own[0]) not in {1, channels}:
            usual = (sum(own[0]) / len(own[0]),), (sum(own[1]) / len(own[1]),)
    mean, std = (source.numbers(key) or usual[i] for i, key in enumerate(NUMBERS))
    for key, numbers in (("mean", mean), ("std", std)):
        if len(numbers) not in {1, channels} or (key == "std" and min(numbers) <= 0):
            raise source.bad(
                f"{key}={','.join(str(n) for n in numbers)}",
                f"one number or {channels}, and std above 0",
                "give one number for each channel",
            )
    return Look((channels, height, width), mean, std, specs[0].name if specs else None)


class Pictures(Rows):
    """A source of images.

    Args:
        request: its source may have the option ``broken``: ``stop``, or ``skip`` to look at every
            image once and leave the broken ones out.
        options: that it may have.
    """

    threads = 1  # that may look for broken images at a time
    _look: Look

    def __init__(self, request: Request, options: Sequence[str] = OPTIONS) -> None:
        source = request.source
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
