"""Small images held in memory: idx files (MNIST, Fashion-MNIST) and scikit-learn's digits.

A batch has `image` (n, 1, height, width), normalized, and `label` (n, 1).
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
from fleetx.data.checks import check_names, optional
from fleetx.data.fingerprint import array_bytes, fingerprint, sampled_bytes
from fleetx.data.images import shuffle_by_default
from fleetx.data.loader import Batch, Loader, LoaderOptions, RecordSource
from fleetx.data.sharding_plan import MaxSamples
from fleetx.errors import DataError, UsageError

FASHION = (0.2860, 0.3530)  # mean and standard deviation of the training pixels in [0, 1]
_FILES = {"train": "train-{}-ubyte", "val": "t10k-{}-ubyte"}
_TRAIN_DIGITS = 1500  # of 1797


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
    """Load images and labels from two idx files of bytes, plain or .gz, as (pixel / 255 - mean) / deviation."""
    _check(options)
    pixels, targets = read_idx(Path(images)), read_idx(Path(labels))
    if pixels.ndim != 3 or targets.ndim != 1:
        raise DataError(
            f"{images} and {labels} have {pixels.ndim} and {targets.ndim} axes: images must have 3, and labels 1"
        )
    if len(pixels) != len(targets):
        raise DataError(f"{images} has {len(pixels)} images, but {labels} has {len(targets)} labels")
    source = ArraySource(pixels[:, None], targets, 255 * mean, 255 * deviation)
    return Loader(source, MaxSamples(batch_size), shuffle=shuffle, **options)


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
    """Load Fashion-MNIST or another data set with the same four file names, plain or .gz; "val" loads the t10k files.

    Both phases are split among the ranks unless shard=False.
    """
    shuffle = shuffle_by_default(phase, shuffle)
    images, labels = (_file(Path(data_dir), _FILES[phase].format(kind)) for kind in ("images-idx3", "labels-idx1"))
    return load_idx_from_file(images, labels, batch_size, shuffle, mean=mean, deviation=deviation, **options)


def load_digits(
    batch_size: int = 32,
    phase: str = "train",
    shuffle: bool | None = None,
    **options: Unpack[LoaderOptions],
) -> Loader:
    """Load scikit-learn's 1,797 handwritten digits of 8 x 8 pixels: 1,500 for "train", the rest for "val".

    Both phases are split among the ranks unless shard=False.
    """
    shuffle = shuffle_by_default(phase, shuffle)
    _check(options)
    digits = optional("sklearn.datasets", "load_digits needs scikit-learn").load_digits()
    # The file has runs of digits by the same writer, so the split is random, but always the same.
    order = rng.permutation(rng.key(0, 0, "digits"), len(digits.target))
    part = order[:_TRAIN_DIGITS] if phase == "train" else order[_TRAIN_DIGITS:]
    source = ArraySource(digits.images[part, None].astype(np.float32), digits.target[part], 8.0, 16.0)
    return Loader(source, MaxSamples(batch_size), shuffle=shuffle, **options)


def read_idx(path: Path) -> np.ndarray:
    """Read an idx file: two zero bytes, the type (8: unsigned bytes), the number of axes, their lengths, the values."""
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    if len(raw) < 4 or raw[:3] != b"\0\0\x08" or len(raw) < 4 + 4 * raw[3]:
        raise DataError(f"{path} is not an idx file of unsigned bytes")
    shape = np.frombuffer(raw, ">u4", count=raw[3], offset=4).tolist()
    begin = 4 + 4 * raw[3]
    if len(raw) - begin != math.prod(shape):
        raise DataError(f"{path} has {len(raw) - begin} values, but its header says {math.prod(shape)}")
    return np.frombuffer(raw, np.uint8, offset=begin).reshape(shape)


class ArraySource(RecordSource):
    """Images and labels in memory; images are normalized as (pixel - mean) / deviation."""

    def __init__(self, images: np.ndarray, labels: np.ndarray, mean: float, deviation: float):
        self.invalid: list[str] = []
        self._images, self._labels = images, labels.astype(np.int64)
        self._mean, self._deviation = mean, deviation

    def __len__(self) -> int:
        return len(self._labels)

    def fingerprint(self) -> str:
        return fingerprint(array_bytes(self._labels), sampled_bytes(self._images))

    def read(self, rows: np.ndarray, seed: int, epoch: int) -> tuple[Batch, list[str]]:
        indices = rows[:, 0]
        image = torch.from_numpy(self._images[indices]).to(torch.float32)
        image.sub_(self._mean).div_(self._deviation)
        return {"image": image, "label": torch.from_numpy(self._labels[indices])[:, None]}, []


def _file(folder: Path, name: str) -> Path:
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise DataError(f"{folder} has neither {name} nor {name}.gz")


def _check(options: LoaderOptions) -> None:
    check_names("an array loader", options, ("batch_size", "shuffle", *LoaderOptions.__annotations__))
    if options.get("on_error", "raise") == "skip":
        raise UsageError(
            'on_error="skip" is not supported here, because an array file is valid as a whole or not at all: remove it'
        )
