"""Image transforms: random crop, center crop and normalization."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels in [0, 1]
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # ranges of a random crop: share of the area, width / height
SHORT_SIDE = 256 / 224  # of a validation image, relative to its center crop
_TRIES = 10
DRAWS = 4 * _TRIES + 1  # random numbers that an image may need


def random_crop(image: Image, size: int, draws: Sequence[float]) -> Image:
    """Crop 8 % to 100 % of the area, resize to (size, size), and flip horizontally half of the time."""
    from PIL.Image import Resampling, Transpose

    crop = image.resize((size, size), Resampling.BILINEAR, box=_crop_box(*image.size, draws))
    return crop.transpose(Transpose.FLIP_LEFT_RIGHT) if draws[-1] < 0.5 else crop


def _crop_box(width: int, height: int, draws: Sequence[float]) -> tuple[int, int, int, int]:
    for i in range(0, 4 * _TRIES, 4):
        area = width * height * (SCALE[0] + draws[i] * (SCALE[1] - SCALE[0]))
        ratio = RATIO[0] * (RATIO[1] / RATIO[0]) ** draws[i + 1]
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(draws[i + 2] * (width - w + 1)), int(draws[i + 3] * (height - h + 1))
            return left, top, left + w, top + h
    # The image is so long and thin that no crop fits: take as much of its middle as the ratios allow.
    w, h = min(width, max(1, round(height * RATIO[1]))), min(height, max(1, round(width / RATIO[0])))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def centre_crop(image: Image, size: int) -> Image:
    """Resize the short side to 256 / 224 of `size`, then crop the center (size, size)."""
    from PIL.Image import Resampling

    factor = round(size * SHORT_SIDE) / min(image.size)
    width, height = (max(size, round(side * factor)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    return image.resize((width, height), Resampling.BILINEAR).crop((left, top, left + size, top + size))


def normalize(image: Image, out: Tensor, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> None:
    """Write (pixel / 255 - mean) / std of an RGB image into a float tensor of shape (3, height, width)."""
    scale = torch.tensor([1 / (255 * s) for s in std])[:, None, None]
    shift = torch.tensor([-m / s for m, s in zip(mean, std, strict=True)])[:, None, None]
    out.copy_(torch.from_numpy(np.array(image)).permute(2, 0, 1))
    out.mul_(scale).add_(shift)
