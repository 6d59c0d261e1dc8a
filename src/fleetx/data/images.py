"""ImageNet lists: a line is "relative/path.JPEG label"; a batch is `image` (n, 3, size, size) and `label` (n, 1)."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch

from fleetx.data import augment, chance
from fleetx.data.broken import Complaints, check_choice, check_whole
from fleetx.data.dealing import BySamples
from fleetx.data.loader import Batch, Loader, LoaderOptions, Plan
from fleetx.data.transport import room
from fleetx.errors import DataError, UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

PHASES = ("train", "val")
LAYOUTS = ("NCHW", "NHWC")


class ImageOptions(LoaderOptions, total=False):
    """What loaders of image files can be told besides."""

    data_layout: str
    image_size: int


def load_imagenet_from_file(
    filelist: str | Path,
    batch_size: int = 32,
    phase: str = "train",
    shuffle: bool | None = None,
    *,
    data_layout: str = "NCHW",
    image_size: int = 224,
    **options: Unpack[LoaderOptions],
) -> Loader:
    """Images of a list. Those of "train" are cut out at random and mirrored, of "val" from the centre.

    They lie in the folder that is called as the list without .txt, or else in the one beside it that is called as the
    phase. Unless `shuffle` says so, "train" is shuffled and "val" is not.
    """
    check_choice("phase", phase, PHASES)
    check_choice("data_layout", data_layout, LAYOUTS)
    check_whole(image_size=image_size)
    shuffle = phase == "train" if shuffle is None else shuffle
    source = ImageList(Path(filelist), phase, data_layout, image_size, options.get("on_error", "raise"))
    return Loader(source, BySamples(batch_size), shuffle=shuffle, **options)


def imagenet_train(
    local_path: str | Path, batch_size: int = 32, shuffle: bool = True, **options: Unpack[ImageOptions]
) -> Loader:
    """The images of train.txt in a folder."""
    return load_imagenet_from_file(Path(local_path) / "train.txt", batch_size, "train", shuffle, **options)


def imagenet_val(
    local_path: str | Path, batch_size: int = 32, shuffle: bool = False, **options: Unpack[ImageOptions]
) -> Loader:
    """The images of val.txt in a folder."""
    return load_imagenet_from_file(Path(local_path) / "val.txt", batch_size, "val", shuffle, **options)


class ImageList:
    """The images that a list names."""

    def __init__(self, filelist: Path, phase: str, layout: str, size: int, on_error: str):
        _check_pillow()
        self._list, self._root = filelist, _root(filelist, phase)
        self._random, self._layout, self._size = phase == "train", layout, size
        complaints = Complaints(on_error)
        names, labels, lines = [], [], []
        for number, line in enumerate(_content(filelist).split(b"\n"), 1):
            parts = line.split()
            if not parts:
                continue
            if len(parts) != 2:
                complaints.add(f"{filelist}, line {number}: {len(parts)} fields instead of 2, a path and a label")
            elif not parts[1].isdigit():
                complaints.add(
                    f"{filelist}, line {number}: the label {parts[1].decode(errors='replace')!r} is no number"
                )
            else:
                names.append(parts[0])
                labels.append(int(parts[1]))
                lines.append(number)
        # Two arrays instead of a million objects: workers are forks, and counting references would copy their pages.
        self._names, self._ends = b"".join(names), np.cumsum([0, *map(len, names)])
        self._labels, self._lines = np.array(labels, np.int64), np.array(lines, np.int64)
        self.broken = complaints.found

    def __len__(self) -> int:
        return len(self._labels)

    def plan(self, seed: int, epoch: int, *, shuffle: bool) -> Plan:
        order = chance.permutation(chance.key(seed, epoch, "order"), len(self)) if shuffle else np.arange(len(self))
        return Plan(order[:, None], np.ones(len(self), np.int64))

    def read(self, rows: np.ndarray, seed: int, epoch: int) -> tuple[Batch, list[str]]:
        which, size = rows[:, 0], self._size
        draws = chance.uniform(chance.key(seed, epoch, "crop"), which[:, None], np.arange(augment.DRAWS)).tolist()
        pixels = room(len(which), 3, size, size)
        kept: list[int] = []
        problems: list[str] = []
        for index, numbers in zip(which.tolist(), draws, strict=True):
            try:
                image = self.open(index)
                cut = augment.cut_anywhere(image, size, numbers) if self._random else augment.cut_centre(image, size)
                augment.normalise(cut, pixels[len(kept)])
                kept.append(index)
            except _BROKEN as error:
                problems.append(f"{self._list}, line {self._lines[index]}: {_sentence(error)}")
        if not kept:
            return {}, problems
        pixels = pixels[: len(kept)]
        if self._layout == "NHWC":
            pixels = pixels.permute(0, 2, 3, 1).contiguous()
        return {"image": pixels, "label": torch.from_numpy(self._labels[kept])[:, None]}, problems

    def open(self, index: int) -> Image:
        """The whole image, in RGB."""
        from PIL import Image

        name = self._names[self._ends[index] : self._ends[index + 1]].decode(errors="surrogateescape")
        path = self._root / name
        try:
            file = open(path, "rb")  # noqa: SIM115
        except FileNotFoundError:
            # Lists that go with the archives of the past say .JPEG, and the files are called .jpeg.
            file = open(self._root / name.replace("JPEG", "jpeg"), "rb")  # noqa: SIM115
        with file:
            try:
                image = Image.open(file)
                image.load()
                return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it
            except (Image.DecompressionBombError, *_BROKEN) as error:
                raise OSError(f"{file.name} cannot be decoded: {str(error).replace(repr(file), 'the file')}") from error


_BROKEN = (OSError, SyntaxError, ValueError, EOFError, struct.error)  # what pillow raises for files that are no images


def _sentence(error: Exception) -> str:
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)


def _root(filelist: Path, phase: str) -> Path:
    named = filelist.with_suffix("")
    return named if filelist.suffix == ".txt" and named.is_dir() else filelist.parent / phase


def _content(filelist: Path) -> bytes:
    try:
        return filelist.read_bytes()
    except OSError as error:
        raise DataError(f"the list of images {filelist} cannot be read: {error.strerror}") from error


def _check_pillow() -> None:
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise UsageError("images need pillow: pip install fleetx[applications]") from error
