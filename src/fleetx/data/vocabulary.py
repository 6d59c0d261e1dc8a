"""vocab.txt: a token per line, whose number is the line, or stands behind a tab."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from fleetx.errors import DataError

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class Vocabulary:
    size: int
    pad: int
    cls: int
    sep: int
    mask: int

    @cached_property
    def ordinary(self) -> np.ndarray:
        """Every number but those of the four special tokens."""
        return np.setdiff1d(np.arange(self.size), [self.pad, self.cls, self.sep, self.mask])


def read_vocabulary(path: Path, at_most: int | None = None) -> Vocabulary:
    """at_most: how many words the model knows; those from there on are left out."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the vocabulary {path} cannot be read: {error}") from error
    while lines and not lines[-1].strip():
        lines.pop()
    numbers: dict[str, int] = {}
    for place, line in enumerate(lines):
        token, tab, number = line.rstrip("\r").partition("\t")
        if tab and not number.strip().isdigit():
            raise DataError(f"{path}, line {place + 1}: {number!r} behind the tab is no number")
        numbers[token.strip()] = int(number) if tab else place
    if absent := [token for token in SPECIAL if token not in numbers]:
        raise DataError(f"the vocabulary {path} lacks {', '.join(absent)}")
    size = max(numbers.values()) + 1
    if at_most is not None and at_most < size:
        if beyond := [token for token in SPECIAL if numbers[token] >= at_most]:
            raise DataError(f"the vocabulary {path} has {beyond[0]} beyond the {at_most} words that the model knows")
        size = at_most
    vocabulary = Vocabulary(size, *(numbers[token] for token in SPECIAL))
    if not len(vocabulary.ordinary):
        raise DataError(f"the vocabulary {path} has no tokens besides the special ones")
    return vocabulary
