"""Fashion-MNIST: 60,000 images for training and validation, 10,000 for testing, 28 x 28 grey pixels, ten classes."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.frame import CannotRunError

PACKAGE = "dataset-fashion-mnist"
FOLDER = Path("/usr/share/datasets/fashion-mnist")
FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}
MEAN, DEVIATION = 0.2860 * 255, 0.3530 * 255  # of the training pixels


@dataclass(frozen=True)
class Images:
    pixels: Tensor  # uint8, (n, 1, 28, 28)
    labels: Tensor  # int64, (n,)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, which: Tensor | slice) -> Images:
        return Images(self.pixels[which], self.labels[which])

    def normalised(self) -> Tensor:
        return (self.pixels.float() - MEAN) / DEVIATION


@dataclass(frozen=True)
class Split:
    """Samples of any kind. Rates and decays are chosen on held-out ones, never on the test set."""

    train: Any
    choose: Any
    test: Any


def missing(folder: Path) -> str:
    """How to get the images, or "" if they are there."""
    absent = [name for names in FILES.values() for name in names if not (folder / name).is_file()]
    if not absent:
        return ""
    return (
        f"{folder} has no {absent[0]}. On Debian and Ubuntu, apt-get install {PACKAGE}; elsewhere, pass the folder "
        f"with the four files ({', '.join(name for names in FILES.values() for name in names)}) as --data"
    )


def load(folder: Path, *, train: int) -> Split:
    if reason := missing(folder):
        raise CannotRunError(reason)
    everything, test = (Images(_idx(folder / x).unsqueeze(1), _idx(folder / y).long()) for x, y in FILES.values())
    # The file is already shuffled, so hold out the last ones.
    return Split(everything[:train], everything[train:], test)


def _idx(path: Path) -> Tensor:
    """Format: two zero bytes, the type (8: unsigned bytes), the number of axes, their lengths, the values."""
    raw = gzip.decompress(path.read_bytes())
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":
        raise CannotRunError(f"{path} is not an idx file of unsigned bytes")
    axes = raw[3]
    shape = np.frombuffer(raw, ">u4", count=axes, offset=4)
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape).copy())
