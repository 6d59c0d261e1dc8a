"""ImageNet lists: a line is "relative/path.JPEG label"; a batch has `image` (n, 3, size, size) and `label` (n, 1)."""

from __future__ import annotations

import codecs
import re
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch

from fleetx.data import augment, rng
from fleetx.data.checks import RecordErrors, check_choice, check_int, check_names, optional
from fleetx.data.fingerprint import array_bytes, fingerprint
from fleetx.data.loader import Batch, Loader, LoaderOptions, RecordSource
from fleetx.data.sharding_plan import MaxSamples
from fleetx.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

PHASES = ("train", "val")
LAYOUTS = ("NCHW", "NHWC")


class ImageOptions(LoaderOptions, total=False):
    """Additional options of image loaders."""

    data_layout: str
    image_size: int
    num_classes: int | None


def load_imagenet_from_file(
    filelist: str | Path,
    batch_size: int = 32,
    phase: str = "train",
    shuffle: bool | None = None,
    *,
    data_layout: str = "NCHW",
    image_size: int = 224,
    num_classes: int | None = None,
    **options: Unpack[LoaderOptions],
) -> Loader:
    """Load the images of a list: random crops and flips for "train", center crops for "val".

    Paths are relative to the folder named like the list without .txt, if there is one, else to the folder next to the
    list that is named after the phase. By default "train" is shuffled and "val" is not. Both are split among the ranks
    unless shard=False. With `num_classes`, a label of `num_classes` or more makes a record invalid.
    """
    shuffle = shuffle_by_default(phase, shuffle)
    check_choice("data_layout", data_layout, LAYOUTS)
    check_int(image_size=image_size)
    if num_classes is not None:
        check_int(num_classes=num_classes)
    check_names("an image loader", options, ("batch_size", "phase", "shuffle", *ImageOptions.__annotations__))
    source = ImageSource(Path(filelist), phase, data_layout, image_size, num_classes, options.get("on_error", "raise"))
    return Loader(source, MaxSamples(batch_size), shuffle=shuffle, **options)


def shuffle_by_default(phase: str, shuffle: bool | None) -> bool:
    """Shuffle training data unless told otherwise."""
    check_choice("phase", phase, PHASES)
    return phase == "train" if shuffle is None else shuffle


def imagenet_train(
    local_path: str | Path, batch_size: int = 32, shuffle: bool = True, **options: Unpack[ImageOptions]
) -> Loader:
    """Load the images listed in the folder's train.txt; see `load_imagenet_from_file`."""
    return load_imagenet_from_file(Path(local_path) / "train.txt", batch_size, "train", shuffle, **options)


def imagenet_val(
    local_path: str | Path, batch_size: int = 32, shuffle: bool = False, **options: Unpack[ImageOptions]
) -> Loader:
    """Load the images listed in the folder's val.txt. They are split among the ranks unless shard=False."""
    return load_imagenet_from_file(Path(local_path) / "val.txt", batch_size, "val", shuffle, **options)


class ImageSource(RecordSource):
    """The images of a list."""

    def __init__(self, filelist: Path, phase: str, layout: str, size: int, classes: int | None, on_error: str):
        optional("PIL", "image loaders need pillow")
        self._list, self._root = filelist, _root(filelist, phase)
        self._random, self._layout, self._size = phase == "train", layout, size
        errors = RecordErrors(on_error)
        names, labels, lines = [], [], []
        for number, line in enumerate(_read(filelist).split(b"\n"), 1):
            parts = line.split()
            if not parts:
                continue
            if problem := _problem(parts, classes):
                errors.add(f"{filelist}, line {number}: {problem}")
            else:
                names.append(parts[0])
                labels.append(int(parts[1]))
                lines.append(number)
        # A few arrays, not a million objects: reference counting would copy their pages into forked workers.
        self._names, self._ends = b"".join(names), np.cumsum([0, *map(len, names)])
        self._labels, self._lines = np.array(labels, np.int64), np.array(lines, np.int64)
        self.invalid = errors.messages

    def __len__(self) -> int:
        return len(self._labels)

    def fingerprint(self) -> str:
        return fingerprint(self._names, array_bytes(self._ends), array_bytes(self._labels))

    def read(self, rows: np.ndarray, seed: int, epoch: int) -> tuple[Batch, list[str]]:
        indices, size = rows[:, 0], self._size
        draws = rng.uniform(rng.key(seed, epoch, "crop"), indices[:, None], np.arange(augment.DRAWS)).tolist()
        pixels = torch.empty(len(indices), 3, size, size)
        valid: list[int] = []
        problems: list[str] = []
        for index, numbers in zip(indices.tolist(), draws, strict=True):
            try:
                image = self.open(index)
                crop = augment.random_crop(image, size, numbers) if self._random else augment.centre_crop(image, size)
                augment.normalize(crop, pixels[len(valid)])
                valid.append(index)
            except Exception as error:  # pillow raises almost anything for an invalid file
                problems.append(f"{self._list}, line {self._lines[index]}: {_describe(self._name(index), error)}")
        if not valid:
            return {}, problems
        pixels = pixels[: len(valid)]
        if self._layout == "NHWC":
            pixels = pixels.permute(0, 2, 3, 1).contiguous()
        return {"image": pixels, "label": torch.from_numpy(self._labels[valid])[:, None]}, problems

    def open(self, index: int) -> Image:
        """Decode an image as RGB."""
        from PIL import Image

        path = self._root / self._name(index)
        if not path.exists():  # some old lists say .JPEG although the files are named .jpeg
            path = self._root / self._name(index).replace("JPEG", "jpeg")
        with open(path, "rb") as file:
            image = Image.open(file)
            image.load()
            return image if image.mode == "RGB" else image.convert("RGB")  # convert() always copies

    def _name(self, index: int) -> str:
        return self._names[self._ends[index] : self._ends[index + 1]].decode(errors="surrogateescape")


def _problem(parts: list[bytes], classes: int | None) -> str:
    """What is wrong with a line of a list, or ""."""
    if len(parts) != 2:
        return f"{len(parts)} fields instead of 2, a path and a label"
    label = parts[1].decode(errors="replace")[:40]
    if not parts[1].isdigit():
        return f"label {label!r} is not a number"
    limit = 1 << 63 if classes is None else classes
    return f"label {label} is outside the {limit} classes" if len(parts[1]) > 20 or int(parts[1]) >= limit else ""


def _describe(name: str, error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"cannot read {name}: {error.strerror}"
    message = re.sub(" ?<_io.*?>", "", str(error))
    return f"cannot decode {name}: {message or type(error).__name__}"


def _root(filelist: Path, phase: str) -> Path:
    named = filelist.with_suffix("")
    return named if filelist.suffix == ".txt" and named.is_dir() else filelist.parent / phase


def _read(filelist: Path) -> bytes:
    try:
        return filelist.read_bytes().removeprefix(codecs.BOM_UTF8)  # which Windows editors write
    except OSError as error:
        raise DataError(f"cannot read the image list {filelist}: {error.strerror}") from error
