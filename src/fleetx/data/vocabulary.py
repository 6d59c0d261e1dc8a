"""BERT's words: the vocabulary, vocab.txt, and masking.

vocab.txt has one token per line. The id of a token is its line number, from 0, or the number after a tab. Masking
selects 15 % of the words: 80 % of these become [MASK], 10 % become a random word, and 10 % stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from fleetx.data import rng
from fleetx.errors import DataError

SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
SELECTED, MASKED, REPLACED = 0.15, 0.15 * 0.8, 0.15 * 0.9  # thresholds for one uniform number per word
_LARGEST = 1 << 24  # more words than any model has: a larger id is a mistake that would take gigabytes


@dataclass(frozen=True)
class Vocabulary:
    size: int
    pad: int
    cls: int
    sep: int
    mask: int

    @cached_property
    def ordinary(self) -> np.ndarray:
        """All ids except those of the four special tokens."""
        return np.setdiff1d(np.arange(self.size), [self.pad, self.cls, self.sep, self.mask])


def read_vocabulary(path: Path, max_size: int | None = None) -> Vocabulary:
    """Read vocab.txt, ignoring ids from `max_size` (the model's vocabulary size) on."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the vocabulary {path}: {error}") from error
    while lines and not lines[-1].strip():
        lines.pop()
    ids: dict[str, int] = {}
    for index, line in enumerate(lines):
        token, tab, number = line.rstrip("\r").partition("\t")
        if tab and not (number.strip().isascii() and number.strip().isdigit()):
            raise DataError(f"{path}, line {index + 1}: {number[:40]!r} after the tab is not a number")
        if tab and (len(number) > 20 or int(number) >= _LARGEST):
            raise DataError(f"{path}, line {index + 1}: the id {number[:40]} is not less than {_LARGEST}")
        ids[token.strip()] = int(number) if tab else index
    if missing := [token for token in SPECIAL if token not in ids]:
        raise DataError(f"the vocabulary {path} has no {', '.join(missing)}")
    size = max(ids.values()) + 1
    if max_size is not None and max_size < size:
        if outside := [token for token in SPECIAL if ids[token] >= max_size]:
            raise DataError(
                f"the vocabulary {path} has {outside[0]} as id {ids[outside[0]]}, outside the model's {max_size} words"
            )
        size = max_size
    vocabulary = Vocabulary(size, *(ids[token] for token in SPECIAL))
    if not len(vocabulary.ordinary):
        raise DataError(f"the vocabulary {path} has only special tokens")
    return vocabulary


def mask(
    words: np.ndarray,  # (batch, width), changed in place
    present: np.ndarray,  # (batch, width), False for padding
    samples: np.ndarray,  # (batch,)
    vocabulary: Vocabulary,
    seed: int,
    epoch: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mask words; return row, column and original word of each, in row order.

    [CLS] and [SEP] are never selected, and every row gets at least one masked word. The result for a word depends on
    seed, epoch, sample and column, not on the rest of the batch.
    """
    columns = np.arange(words.shape[1])
    draws = rng.uniform(rng.key(seed, epoch, "mask"), samples[:, None], columns)
    draws[~present | (words == vocabulary.cls) | (words == vocabulary.sep)] = 2.0
    empty = np.flatnonzero(draws.min(1) > SELECTED)  # rows without a selected word: mask the one with the lowest draw
    lowest = draws[empty].argmin(1)
    possible = draws[empty, lowest] < 1.0
    draws[empty[possible], lowest[possible]] = 0.0
    row, column = np.nonzero(draws <= SELECTED)
    selected, originals = draws[row, column], words[row, column]
    substitutes = rng.uniform(rng.key(seed, epoch, "substitute"), samples[row], column)
    others = vocabulary.ordinary[(substitutes * len(vocabulary.ordinary)).astype(np.int64)]
    words[row, column] = np.where(
        selected <= MASKED, vocabulary.mask, np.where(selected <= REPLACED, others, originals)
    )
    return row, column, originals
