"""The speed of fleetx.data, compared with a Dataset and DataLoader written in plain torch.

Both sides give equal batches, which is checked first, and mask, crop and normalize with the same functions of fleetx.
They differ in what loaders do: torch's side parses a line whenever it is read, without checking its values; fleetx
parses and checks all lines once, so that only `bert_first` has parsing on both sides. torch's side converts every image
to RGB, fleetx only those that are not. torch's side draws crops with `random`, which is cheaper but cannot be resumed.
Each measured sample is an epoch.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.frame import Run, Sides, benchmark

PAGE = "loaders.md"
LINES, WORDS, LONGEST, LINES_A_BATCH = 2000, 21128, 512, 32
IMAGES, IMAGES_A_BATCH, SIDE = 128, 32, 224
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]


@benchmark(ours="fleetx", theirs="torch", goal=1.0, rounds=20, starts=2)
def bert(run: Run) -> Sides:
    """An epoch of BERT lines, without workers."""
    return bert_epochs(run)


@benchmark(ours="fleetx", theirs="torch", goal=1.0, rounds=20, starts=2)
def bert_workers(run: Run) -> Sides:
    """An epoch of BERT lines, with two persistent workers."""
    return bert_epochs(run, num_workers=2, persistent_workers=True)


@benchmark(ours="fleetx", theirs="torch", goal=1.0, rounds=20, starts=2)
def bert_first(run: Run) -> Sides:
    """Reading BERT files and the first epoch."""
    with digital_files() as (folder, vocabulary):
        ours, theirs = (lambda make=make: iterate(make(folder, vocabulary)) for make in (our_lines, their_lines))
        return run.compare(ours, theirs, lines=LINES)


@benchmark(ours="fleetx", theirs="torch", goal=1.0, rounds=20, starts=2)
def images(run: Run) -> Sides:
    """An epoch of random crops from an ImageNet list, without workers."""
    return image_epochs(run)


@benchmark(ours="fleetx", theirs="torch", goal=1.0, rounds=20, starts=2)
def images_workers(run: Run) -> Sides:
    """An epoch of random crops from an ImageNet list, with two persistent workers."""
    return image_epochs(run, num_workers=2, persistent_workers=True)


def iterate(loader: Any) -> None:
    for _ in loader:
        pass


def compared(run: Run, ours: Callable[[], Any], theirs: Callable[[], Any], records: int, what: str) -> Sides:
    a, b = run.both(ours, theirs)
    result = run.compare(lambda: iterate(a), lambda: iterate(b))
    rates = {"ours": records / min(result.ours), "theirs": records / min(result.theirs)}
    result.notes[f"{what}_per_second"] = rates
    return result


# --- BERT -----------------------------------------------------------------------------------------
def bert_epochs(run: Run, **options: Any) -> Sides:
    with digital_files() as (folder, vocabulary):
        same(our_lines(folder, vocabulary, shuffle=False), their_lines(folder, vocabulary, shuffle=False))
        return compared(
            run,
            lambda: our_lines(folder, vocabulary, **options),
            lambda: their_lines(folder, vocabulary, **options),
            LINES,
            "lines",
        )


def our_lines(folder: Path, vocabulary: Path, **options: Any) -> Any:
    from fleetx.data import load_digital_dataset_from_file

    return load_digital_dataset_from_file(
        folder, vocabulary, LINES_A_BATCH, LONGEST, generate_neg_sample=False, **options
    )


def their_lines(folder: Path, vocabulary: Path, *, shuffle: bool = True, **options: Any) -> Any:
    import numpy as np
    import torch
    from torch.utils.data import DataLoader, Dataset

    from fleetx.data.vocabulary import mask, read_vocabulary

    known = read_vocabulary(vocabulary)

    class Lines(Dataset):
        def __init__(self) -> None:
            files = sorted(folder.iterdir())
            self.lines = [line for file in files for line in file.read_bytes().splitlines()]

        def __len__(self) -> int:
            return len(self.lines)

        def __getitem__(self, i: int) -> Any:
            return i, *(np.fromstring(field, np.int64, sep=" ") for field in self.lines[i].split(b";"))

    def collate(samples: Any) -> dict[str, Any]:
        size, width = len(samples), max(len(sample[1]) for sample in samples)
        words = np.full((size, width), known.pad)
        positions, sentences, present = (np.zeros((size, width), np.int64) for _ in range(3))
        for row, sample in enumerate(samples):
            n = len(sample[1])
            words[row, :n], sentences[row, :n], positions[row, :n] = sample[1:4]
            present[row, :n] = 1
        numbers = np.array([2 * sample[0] for sample in samples])
        row, column, answers = mask(words, present.astype(bool), numbers, known, 0, 0)
        arrays = {
            "src_ids": words, "pos_ids": positions, "sent_ids": sentences,
            "input_mask": present.astype(np.float32)[:, :, None], "mask_label": answers[:, None],
            "mask_pos": (row * width + column)[:, None], "labels": np.array([sample[4] for sample in samples]),
        }  # fmt: skip
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    return DataLoader(Lines(), LINES_A_BATCH, shuffle=shuffle, collate_fn=collate, **options)


@contextmanager
def digital_files() -> Iterator[tuple[Path, Path]]:
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "data"
        folder.mkdir()
        for part in range(2):
            with open(folder / f"part{part}", "w") as file:
                for _ in range(LINES // 2):
                    a, b = rng.randint(30, 254), rng.randint(30, 254)
                    text = [str(rng.randint(4, WORDS - 1)) for _ in range(a + b)]
                    words = ["1", *text[:a], "2", *text[a:], "2"]
                    sentences = ["0"] * (a + 2) + ["1"] * (b + 1)
                    file.write(";".join(map(" ".join, (words, sentences, map(str, range(a + b + 3))))) + ";1\n")
        vocabulary = Path(name) / "vocab.txt"
        vocabulary.write_text("\n".join([*SPECIAL, *(f"w{i}" for i in range(WORDS - 4))]))
        yield folder, vocabulary


# --- images ---------------------------------------------------------------------------------------
def image_epochs(run: Run, **options: Any) -> Sides:
    with image_files() as filelist:
        same(our_images(filelist, phase="val"), their_images(filelist, phase="val"))
        return compared(
            run, lambda: our_images(filelist, **options), lambda: their_images(filelist, **options), IMAGES, "images"
        )


def our_images(filelist: Path, **options: Any) -> Any:
    from fleetx.data import load_imagenet_from_file

    return load_imagenet_from_file(filelist, IMAGES_A_BATCH, **options)


def their_images(filelist: Path, *, phase: str = "train", **options: Any) -> Any:
    import torch
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset

    from fleetx.data.augment import DRAWS, centre_crop, normalize, random_crop

    class Images(Dataset):
        def __init__(self) -> None:
            self.lines = [line.split() for line in filelist.read_text().splitlines()]

        def __len__(self) -> int:
            return len(self.lines)

        def __getitem__(self, i: int) -> Any:
            name, label = self.lines[i]
            image = Image.open(filelist.with_suffix("") / name).convert("RGB")
            if phase == "train":
                image = random_crop(image, SIDE, [random.random() for _ in range(DRAWS)])
            else:
                image = centre_crop(image, SIDE)
            pixels = torch.empty(3, SIDE, SIDE)
            normalize(image, pixels)
            return {"image": pixels, "label": torch.tensor([int(label)])}

    return DataLoader(Images(), IMAGES_A_BATCH, shuffle=phase == "train", **options)


@contextmanager
def image_files() -> Iterator[Path]:
    """Images of ImageNet's size, with enough detail for about 100 kB each."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "train"
        folder.mkdir()
        for i in range(IMAGES):
            coarse = Image.fromarray(noise.integers(0, 256, (94, 125, 3), np.uint8))
            coarse.resize((500, 375), Image.Resampling.BICUBIC).save(folder / f"{i}.JPEG", quality=90)
        filelist = Path(name) / "train.txt"
        filelist.write_text("".join(f"{i}.JPEG {i}\n" for i in range(IMAGES)))
        yield filelist


def same(ours: Any, theirs: Any) -> None:
    import torch

    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert torch.equal(a[name], b[name]), f"{name} differs"
