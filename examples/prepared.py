"""Data for the examples, made on the spot: nothing is downloaded. Several workers may ask at once."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
WORDS = 2000  # in the vocabulary


def digits(folder: str | Path, side: int = 32) -> Path:
    """The 1,797 scans of handwritten digits inside of scikit-learn as JPEG files, listed as ImageNet's are.

    The folder's name is followed by the side. train.txt and val.txt have a line `name label` for each picture in
    train/ and val/.
    """
    return _once(Path(f"{folder}{side}"), lambda where: _write_digits(where, side))


def _write_digits(folder: Path, side: int) -> None:
    from PIL import Image
    from sklearn.datasets import load_digits

    found = load_digits()
    for phase, held_out in (("train", False), ("val", True)):
        (folder / phase).mkdir()
        lines = []
        for number, (pixels, label) in enumerate(zip(found.images, found.target, strict=True)):
            if (number % 6 == 5) is held_out:
                picture = Image.fromarray((pixels * 255 / 16).astype("uint8")).resize((side, side)).convert("RGB")
                picture.save(folder / phase / f"{number}.jpg", quality=95)
                lines.append(f"{number}.jpg {label}\n")
        (folder / f"{phase}.txt").write_text("".join(lines))


def text(folder: str | Path) -> Path:
    """The documents of this project as BERT's digital data: numbers instead of words, two sentences in a line.

    Lines of four fields: words, sentence, place, and 1, because the second sentence follows the first. The loader makes
    those in which it does not, and masks words.
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
    number = {word: i for i, word in enumerate(vocabulary)}
    unknown, begin, between = number["[UNK]"], number["[CLS]"], number["[SEP]"]
    lines = []
    for first, second in itertools.pairwise(sentences):
        a, b = ([number.get(word, unknown) for word in words] for words in (first, second))
        words = [begin, *a, between, *b, between]
        columns = words, [0] * (len(a) + 2) + [1] * (len(b) + 1), range(len(words))
        lines.append(";".join([*(" ".join(map(str, column)) for column in columns), "1"]))
    (folder / "part-0").write_text("\n".join(lines) + "\n")


def _once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Written beside and renamed: whoever is first wins, and nobody sees half of it."""
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        write(beside)
        os.rename(beside, folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder
