"""What is done to an image between the file and the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, of pixels in [0, 1]
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of the area that is cut out, and of its sides
SHORT_SIDE = 256 / 224  # of a validation image before its centre is cut out, in units of what is cut out
_TRIES = 10
DRAWS = 4 * _TRIES + 1  # how many random numbers an image may need


def cut_anywhere(image: Image, size: int, draws: Sequence[float]) -> Image:
    """A random part of the image, of 0.08 to 1 of its area, at (size, size); mirrored in half of the cases."""
    from PIL.Image import Resampling, Transpose

    found = image.resize((size, size), Resampling.BILINEAR, box=_box(*image.size, draws))
    return found.transpose(Transpose.FLIP_LEFT_RIGHT) if draws[-1] < 0.5 else found


def _box(width: int, height: int, draws: Sequence[float]) -> tuple[int, int, int, int]:
    for i in range(0, 4 * _TRIES, 4):
        area = width * height * (SCALE[0] + draws[i] * (SCALE[1] - SCALE[0]))
        ratio = RATIO[0] * (RATIO[1] / RATIO[0]) ** draws[i + 1]
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(draws[i + 2] * (width - w + 1)), int(draws[i + 3] * (height - h + 1))
            return left, top, left + w, top + h
    # An image so long and thin that nothing fitted: as much of its middle as the ratios allow.
    w, h = min(width, max(1, round(height * RATIO[1]))), min(height, max(1, round(width / RATIO[0])))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def cut_centre(image: Image, size: int) -> Image:
    """The middle (size, size) of the image, whose short side is first made 256 / 224 of that."""
    from PIL.Image import Resampling

    factor = round(size * SHORT_SIDE) / min(image.size)
    width, height = (max(size, round(side * factor)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    return image.resize((width, height), Resampling.BILINEAR).crop((left, top, left + size, top + size))


def normalise(image: Image, out: Tensor, mean: Sequence[float] = MEAN, deviation: Sequence[float] = DEVIATION) -> None:
    """(pixel / 255 - mean) / deviation, from an RGB image into a float tensor of (3, height, width)."""
    scale = torch.tensor([1 / (255 * d) for d in deviation])[:, None, None]
    shift = torch.tensor([-m / d for m, d in zip(mean, deviation, strict=True)])[:, None, None]
    out.copy_(torch.from_numpy(np.array(image)).permute(2, 0, 1))
    out.mul_(scale).add_(shift)
