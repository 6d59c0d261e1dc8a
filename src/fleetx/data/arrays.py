"""Small images that are held in memory: idx files (MNIST, Fashion-MNIST) and scikit-learn's digits.

A batch is `image` (n, 1, height, width), normalised, and `label` (n, 1).
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Unpack

import numpy as np
import torch

from fleetx.data import rng
from fleetx.data.checks import check_names
from fleetx.data.fingerprint import all_of, fingerprint, pieces_of
from fleetx.data.images import shuffled
from fleetx.data.loader import Batch, Loader, LoaderOptions, Plan, plan_alike
from fleetx.data.sharding_plan import BySamples
from fleetx.errors import DataError, UsageError

FASHION = (0.2860, 0.3530)  # mean and deviation of the training pixels, in [0, 1]
_FILES = {"train": "train-{}-ubyte", "val": "t10k-{}-ubyte"}
_DIGITS_TO_TRAIN = 1500  # of 1797


def load_idx_from_file(
    images: str | Path,
    labels: str | Path,
    batch_size: int = 32,
    shuffle: bool = True,
    *,
    mean: float = 0.0,
    deviation: float = 1.0,
    **options: Unpack[LoaderOptions],
) -> Loader:
    """The images and labels of two idx files of bytes, plain or .gz: (pixel / 255 - mean) / deviation."""
    _check(options)
    pixels, marks = read_idx(Path(images)), read_idx(Path(labels))
    if pixels.ndim != 3 or marks.ndim != 1:
        raise DataError(
            f"{images} and {labels} have {pixels.ndim} and {marks.ndim} axes; images have 3, and their labels 1"
        )
    if len(pixels) != len(marks):
        raise DataError(f"{images} has {len(pixels)} images, and {labels} has {len(marks)} labels")
    source = Arrays(pixels[:, None], marks, 255 * mean, 255 * deviation)
    return Loader(source, BySamples(batch_size), shuffle=shuffle, **options)


def load_fashion_mnist(
    data_dir: str | Path,
    batch_size: int = 32,
    phase: str = "train",
    shuffle: bool | None = None,
    *,
    mean: float = FASHION[0],
    deviation: float = FASHION[1],
    **options: Unpack[LoaderOptions],
) -> Loader:
    """Fashion-MNIST, or what else has files of the same four names, plain or .gz; "val" are those called t10k.

    Both are divided between the ranks, unless shard=False.
    """
    shuffle = shuffled(phase, shuffle)
    images, labels = (_file(Path(data_dir), _FILES[phase].format(kind)) for kind in ("images-idx3", "labels-idx1"))
    return load_idx_from_file(images, labels, batch_size, shuffle, mean=mean, deviation=deviation, **options)


def load_digits(
    batch_size: int = 32,
    phase: str = "train",
    shuffle: bool | None = None,
    **options: Unpack[LoaderOptions],
) -> Loader:
    """The 1,797 scans of 8 x 8 pixels inside of scikit-learn: 1,500 to train with, the others are "val".

    Both are divided between the ranks, unless shard=False.
    """
    shuffle = shuffled(phase, shuffle)
    _check(options)
    try:
        from sklearn import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError("the digits need scikit-learn: pip install fleetx[applications]") from error
    digits = datasets.load_digits()
    # The file has runs of digits by one hand, so what is held out is drawn from all of it, always the same.
    order = rng.permutation(rng.key(0, 0, "digits"), len(digits.target))
    mine = order[:_DIGITS_TO_TRAIN] if phase == "train" else order[_DIGITS_TO_TRAIN:]
    source = Arrays(digits.images[mine, None].astype(np.float32), digits.target[mine], 8.0, 16.0)
    return Loader(source, BySamples(batch_size), shuffle=shuffle, **options)


def read_idx(path: Path) -> np.ndarray:
    """The format: two zero bytes, the type (8: unsigned bytes), the number of axes; their lengths; the values."""
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3]:
        raise DataError(f"{path} is not a file of unsigned bytes in the format idx")
    shape = np.frombuffer(raw, ">u4", count=raw[3], offset=4).tolist()
    begin = 4 + 4 * raw[3]
    if len(raw) - begin != math.prod(shape):
        raise DataError(f"{path} has {len(raw) - begin} values, and its head promises {math.prod(shape)}")
    return np.frombuffer(raw, np.uint8, offset=begin).reshape(shape)


class Arrays:
    """Images and labels in memory: (pixel - mean) / deviation."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, mean: float, deviation: float):
        self.broken: list[str] = []
        self._images, self._labels = images, labels.astype(np.int64)
        self._mean, self._deviation = mean, deviation

    def __len__(self) -> int:
        return len(self._labels)

    def fingerprint(self) -> str:
        return fingerprint(all_of(self._labels), pieces_of(self._images))

    def plan(self, seed: int, epoch: int, *, shuffle: bool) -> Plan:
        return plan_alike(len(self), seed, epoch, shuffle=shuffle)

    def read(self, rows: np.ndarray, seed: int, epoch: int) -> tuple[Batch, list[str]]:
        which = rows[:, 0]
        image = torch.from_numpy(self._images[which]).to(torch.float32)
        image.sub_(self._mean).div_(self._deviation)
        return {"image": image, "label": torch.from_numpy(self._labels[which])[:, None]}, []


def _file(folder: Path, name: str) -> Path:
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise DataError(f"{folder} has neither {name} nor {name}.gz")


def _check(options: LoaderOptions) -> None:
    check_names("a loader of arrays", options, ("batch_size", "shuffle", *LoaderOptions.__annotations__))
    if options.get("on_error", "raise") == "skip":
        raise UsageError('on_error="skip" means nothing here: a file of arrays is sound as a whole, or not')
