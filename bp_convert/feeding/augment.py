"""The paper's augmentation: rotation, crop, flip, channel swap (section IV-B).

Each example's change is drawn from (seed, epoch, row) alone, so that it does not depend on the
process that reads it. The paper gives no amounts; ours are below.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bp_convert.data.dataset import Batch
from bp_convert.errors import DataError

DEGREES = 15.0
SHIFT = 1 / 8  # of the image's side, as cropping after a padding of an eighth does
SWAPPED = 0.5  # share of images whose channels change places


def paper(batch: Batch, keys: Sequence[tuple[int, int, int]]) -> Batch:
    """Rotate, shift, flip and recolour the images of a batch.

    Args:
        batch: one input (N, C, H, W), floating-point.
        keys: what decides each image's change.

    Raises:
        DataError: the batch is not one of images.
    """
    args, kwargs = batch
    values = [*args, *kwargs.values()]
    if len(values) != 1 or values[0].dim() != 4 or not values[0].is_floating_point():
        raise DataError(
            where="augment=paper",
            found=f"inputs of shapes {[tuple(one.shape) for one in values]}",
            allowed="images (N, C, H, W)",
            fix="leave augment out: these are no images",
        )
    changed = augmented(values[0], keys)
    return ((changed,), {}) if args else ((), dict.fromkeys(kwargs, changed))


def augmented(images: Tensor, keys: Sequence[tuple[int, int, int]]) -> Tensor:
    """Return changed images (N, C, H, W); what comes into view is 0, the mean."""
    count, channels, height, width = images.shape
    draws = [np.random.default_rng(key) for key in keys]
    numbers = torch.tensor(np.stack([one.random(5) for one in draws]), dtype=images.dtype)
    angle = (2 * numbers[:, 0] - 1) * DEGREES * torch.pi / 180
    shifts = torch.round((2 * numbers[:, 1:3] - 1) * SHIFT * torch.tensor([width, height]))
    flip = torch.where(numbers[:, 3] < 0.5, -1.0, 1.0).to(images.dtype)
    cos, sin = angle.cos(), angle.sin()
    ratio = height / width
    # Rows of the inverse map, in coordinates from -1 to 1
    theta = torch.stack(
        [
            torch.stack([flip * cos, -sin * ratio, 2 * shifts[:, 0] / width], 1),
            torch.stack([flip * sin / ratio, cos, 2 * shifts[:, 1] / height], 1),
        ],
        1,
    )  # (N, 2, 3)
    grid = F.affine_grid(theta, [count, channels, height, width], align_corners=False)
    moved = F.grid_sample(images, grid, align_corners=False)
    if channels == 1:
        return moved
    orders = torch.tensor(
        np.stack(
            [
                one.permutation(channels) if swap < SWAPPED else np.arange(channels)
                for one, swap in zip(draws, numbers[:, 4].tolist(), strict=True)
            ]
        )
    )
    index = orders[:, :, None, None].expand(count, channels, height, width)
    return moved.gather(1, index)
