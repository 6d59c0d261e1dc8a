"""Data for the examples, created on first use; nothing is downloaded. Several workers can call this at once."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
_EXTRA = "this example needs {}: pip install fleetx[applications], or in a clone, pip install .[applications]"
WORDS = 2000  # vocabulary size


def digits(folder: str | Path, side: int = 32) -> Path:
    """Write scikit-learn's 1,797 handwritten digits as JPEG files with ImageNet-style lists.

    The side is appended to the folder's name. train.txt and val.txt have a line `name label` for each image in train/
    and val/.
    """
    return _once(Path(f"{folder}{side}"), lambda temporary: _write_digits(temporary, side))


def _write_digits(folder: Path, side: int) -> None:
    data = sklearn_digits()
    try:
        from PIL import Image
    except ImportError as error:
        raise SystemExit(_EXTRA.format("pillow")) from error
    for phase, held_out in (("train", False), ("val", True)):
        (folder / phase).mkdir()
        lines = []
        for number, (pixels, label) in enumerate(zip(data.images, data.target, strict=True)):
            if (number % 6 == 5) is held_out:
                image = Image.fromarray((pixels * 255 / 16).astype("uint8")).resize((side, side)).convert("RGB")
                image.save(folder / phase / f"{number}.jpg", quality=95)
                lines.append(f"{number}.jpg {label}\n")
        (folder / f"{phase}.txt").write_text("".join(lines))


def sklearn_digits() -> Any:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise SystemExit(_EXTRA.format("scikit-learn")) from error
    return load_digits()


def text(folder: str | Path) -> Path:
    """Write the documentation of this project as tokenized BERT data, two sentences per line.

    A line has four fields: words, sentences, positions, and the label 1, because the second sentence follows the first.
    The loader builds the negative samples and masks words.
    """
    return _once(Path(folder), _write_text)


def _write_text(folder: Path) -> None:
    pages = sorted(HERE.parent.glob("docs/**/*.md")) + sorted(HERE.parent.glob("*.md"))
    sentences = [
        words
        for page in pages
        for sentence in re.split(r"[.:;|\n]\s", page.read_text(encoding="utf-8"))
        if 4 <= len(words := re.findall(r"[a-z]+|\d", sentence.lower())) <= 28
    ]
    common = [word for word, _ in Counter(word for words in sentences for word in words).most_common(WORDS)]
    vocabulary = [*SPECIAL, *common][:WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    ids = {word: i for i, word in enumerate(vocabulary)}
    unk, cls, sep = ids["[UNK]"], ids["[CLS]"], ids["[SEP]"]
    lines = []
    for first, second in itertools.pairwise(sentences):
        a, b = ([ids.get(word, unk) for word in words] for words in (first, second))
        words = [cls, *a, sep, *b, sep]
        columns = words, [0] * (len(a) + 2) + [1] * (len(b) + 1), range(len(words))
        lines.append(";".join([*(" ".join(map(str, column)) for column in columns), "1"]))
    (folder / "part-0").write_text("\n".join(lines) + "\n")


def _once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Write a temporary folder and rename it, so that `folder` is never incomplete. The first worker wins."""
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        write(temporary)
        os.rename(temporary, folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
