"""Many lines of four fields at once: what `lines.parse` does to each of them, in about two thirds of the time.

Whatever is unusual about a block, if only one character, is left to `lines.parse`, which knows what to say about it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fleetx.data.vocabulary import Vocabulary

_USUAL = b"0123456789 ;\n"


class Block(NamedTuple):
    lengths: np.ndarray
    words: np.ndarray
    sentences: np.ndarray
    positions: np.ndarray
    labels: np.ndarray
    heads: np.ndarray


def parse_block(lines: list[bytes], vocabulary: Vocabulary, *, longest: int, only_positive: bool) -> Block | None:
    """None if any of them is not as it should be."""
    text = b"\n".join(lines) + b"\n"
    if text.translate(None, _USUAL):
        return None
    characters = np.frombuffer(text, np.uint8)
    borders = np.flatnonzero((characters == ord(";")) | (characters == ord("\n")))
    if len(borders) != 4 * len(lines) or np.any(characters[borders[3::4]] != ord("\n")):
        return None
    spaces = np.searchsorted(np.flatnonzero(characters == ord(" ")), borders)
    counts = (np.diff(spaces, prepend=0) + 1).reshape(-1, 4)
    n = counts[:, 0]
    if np.any(counts[:, 1] != n) or np.any(counts[:, 2] != n) or np.any(counts[:, 3] != 1):
        return None
    try:
        values = np.fromstring(text.replace(b";", b" "), np.int64, sep=" ")
    except ValueError:
        return None
    if len(values) != counts.sum():
        return None
    ends, starts = np.cumsum(n), np.cumsum(n) - n
    firsts = np.cumsum(3 * n + 1) - (3 * n + 1)  # where the values of a line begin
    places = np.repeat(firsts - starts, n) + np.arange(ends[-1])
    step = np.repeat(n, n)
    words, sentences, positions = values[places], values[places + step], values[places + 2 * step]
    labels = values[firsts + 3 * n]
    separators = np.append(np.flatnonzero(words == vocabulary.sep), ends[-1])
    first = separators[np.searchsorted(separators, starts)]  # of each line, or beyond it
    ordinary = (words != vocabulary.sep) & (words != vocabulary.cls)
    if (
        words.max() >= vocabulary.size
        or sentences.max() > 1
        or (positions.max() >= longest and np.any(np.maximum.reduceat(positions, starts)[n <= longest] >= longest))
        or np.any(labels != 1 if only_positive else labels > 1)
        or (only_positive and np.any(first >= ends))
        or not np.logical_or.reduceat(ordinary, starts).all()
    ):
        return None
    return Block(n, words, sentences, positions, labels, np.minimum(first + 1, ends) - starts)
