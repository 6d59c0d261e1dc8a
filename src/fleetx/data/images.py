"""ImageNet lists: a line is "relative/path.JPEG label"; a batch is `image` (n, 3, size, size) and `label` (n, 1)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch

from fleetx.data import augment, rng
from fleetx.data.checks import check_choice, check_names, check_whole
from fleetx.data.errors import Complaints
from fleetx.data.fingerprint import all_of, fingerprint
from fleetx.data.loader import Batch, Loader, LoaderOptions, Plan, plan_alike
from fleetx.data.sharding_plan import BySamples
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
    """Images of a list. Those of "train" are cut out at random and mirrored, of "val" from the centre.

    They lie in the folder that is called as the list without .txt, or else in the one beside it that is called as the
    phase. Unless `shuffle` says so, "train" is shuffled and "val" is not. Both are divided between the ranks, unless
    shard=False. With `num_classes`, labels from there on are broken records.
    """
    shuffle = shuffled(phase, shuffle)
    check_choice("data_layout", data_layout, LAYOUTS)
    check_whole(image_size=image_size)
    if num_classes is not None:
        check_whole(num_classes=num_classes)
    check_names("a loader of images", options, ("batch_size", "phase", "shuffle", *ImageOptions.__annotations__))
    source = ImageList(Path(filelist), phase, data_layout, image_size, num_classes, options.get("on_error", "raise"))
    return Loader(source, BySamples(batch_size), shuffle=shuffle, **options)


def shuffled(phase: str, shuffle: bool | None) -> bool:
    """As it was said; else what is trained with is."""
    check_choice("phase", phase, PHASES)
    return phase == "train" if shuffle is None else shuffle


def imagenet_train(
    local_path: str | Path, batch_size: int = 32, shuffle: bool = True, **options: Unpack[ImageOptions]
) -> Loader:
    """The images of train.txt in a folder, as in `load_imagenet_from_file`."""
    return load_imagenet_from_file(Path(local_path) / "train.txt", batch_size, "train", shuffle, **options)


def imagenet_val(
    local_path: str | Path, batch_size: int = 32, shuffle: bool = False, **options: Unpack[ImageOptions]
) -> Loader:
    """The images of val.txt in a folder. Each rank gets its share of them, unless shard=False."""
    return load_imagenet_from_file(Path(local_path) / "val.txt", batch_size, "val", shuffle, **options)


class ImageList:
    """The images that a list names."""

    def __init__(self, filelist: Path, phase: str, layout: str, size: int, classes: int | None, on_error: str):
        _check_pillow()
        self._list, self._root = filelist, _root(filelist, phase)
        self._random, self._layout, self._size = phase == "train", layout, size
        complaints = Complaints(on_error)
        limit = 1 << 63 if classes is None else classes
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
            elif int(parts[1]) >= limit:
                complaints.add(f"{filelist}, line {number}: the label {int(parts[1])} is beyond the {limit} classes")
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

    def fingerprint(self) -> str:
        return fingerprint(self._names, all_of(self._ends), all_of(self._labels))

    def plan(self, seed: int, epoch: int, *, shuffle: bool) -> Plan:
        return plan_alike(len(self), seed, epoch, shuffle=shuffle)

    def read(self, rows: np.ndarray, seed: int, epoch: int) -> tuple[Batch, list[str]]:
        which, size = rows[:, 0], self._size
        draws = rng.uniform(rng.key(seed, epoch, "crop"), which[:, None], np.arange(augment.DRAWS)).tolist()
        pixels = room(len(which), 3, size, size)
        kept: list[int] = []
        problems: list[str] = []
        for index, numbers in zip(which.tolist(), draws, strict=True):
            try:
                image = self.open(index)
                cut = augment.cut_anywhere(image, size, numbers) if self._random else augment.cut_centre(image, size)
                augment.normalise(cut, pixels[len(kept)])
                kept.append(index)
            except Exception as error:  # pillow raises almost anything for what is no image
                problems.append(f"{self._list}, line {self._lines[index]}: {self._name(index)} {_sentence(error)}")
        if not kept:
            return {}, problems
        pixels = pixels[: len(kept)]
        if self._layout == "NHWC":
            pixels = pixels.permute(0, 2, 3, 1).contiguous()
        return {"image": pixels, "label": torch.from_numpy(self._labels[kept])[:, None]}, problems

    def open(self, index: int) -> Image:
        """The whole image, in RGB."""
        from PIL import Image

        path = self._root / self._name(index)
        if not path.exists():  # lists that go with the archives of the past say .JPEG, and the files are called .jpeg
            path = self._root / self._name(index).replace("JPEG", "jpeg")
        with open(path, "rb") as file:
            image = Image.open(file)
            image.load()
            return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it

    def _name(self, index: int) -> str:
        return self._names[self._ends[index] : self._ends[index + 1]].decode(errors="surrogateescape")


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}"
    why = re.sub(" ?<_io.*?>", "", str(error))
    return f"cannot be decoded: {why or type(error).__name__}"


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
