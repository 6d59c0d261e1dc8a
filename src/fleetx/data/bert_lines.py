"""Lines of BERT's digital data, and many of them as a few arrays.

Chinese, 4 fields:  words;sentences;positions;label
English, 7 fields:  words;input_mask;sentences;masked positions;masked words;masked weights;label

Fields are separated by semicolons, numbers by single spaces.

The text is read once. A .gz file cannot be entered in its middle, and lengths must be known before batches can be made
of them, so every line must be looked at anyhow; as small integers it takes half of the room, and later epochs need not
parse it again. What is wrong with the data is known before training begins.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np

from fleetx.data.blocks import parse_block
from fleetx.data.errors import Complaints
from fleetx.data.vocabulary import Vocabulary
from fleetx.errors import DataError

FIELDS = {"ch": 4, "en": 7}
_BLOCK = 128  # lines that are parsed at once; more do not stay in the cache


class Rules(TypedDict):
    """What lines must keep to besides; see `parse`."""

    longest: int
    only_positive: bool


class WrongLineError(ValueError):
    """What is wrong with a line, without where it is."""


@dataclass(frozen=True)
class Line:
    words: np.ndarray
    sentences: np.ndarray
    positions: np.ndarray
    present: np.ndarray  # 0 where the line was filled up
    masked: np.ndarray  # positions of words that were masked before; English only
    answers: np.ndarray  # and what they were
    label: int
    head: int  # how many words up to the first [SEP], which is among them


@dataclass(frozen=True)
class Lines:
    """All lines: flat arrays, and where each line begins in them."""

    starts: np.ndarray
    words: np.ndarray
    sentences: np.ndarray
    positions: np.ndarray
    present: np.ndarray
    masked_starts: np.ndarray
    masked: np.ndarray
    answers: np.ndarray
    labels: np.ndarray
    heads: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)


def parse(
    line: bytes, vocabulary: Vocabulary, lang: str, *, longest: int | None = None, only_positive: bool = False
) -> Line:
    """One line; WrongLineError says what is wrong with it.

    longest: lines of more words are left out later, and others must not have positions beyond it.
    """
    columns = line.split(b";")
    if len(columns) != FIELDS[lang]:
        raise WrongLineError(f"{len(columns)} fields instead of {FIELDS[lang]}")
    if lang == "en":
        return _english(columns, vocabulary)
    counts = [column.count(b" ") + 1 for column in columns]
    n = counts[0]
    if counts != [n, n, n, 1]:
        raise WrongLineError(f"words, sentences, positions and label have the lengths {counts}, not n, n, n and 1")
    values = _numbers(line.replace(b";", b" "), 3 * n + 1)
    words, sentences, positions, label = values[:n], values[n : 2 * n], values[2 * n : 3 * n], int(values[-1])
    _check(values, words, vocabulary)
    _check_sentences(sentences)
    if longest is not None and n <= longest and (furthest := int(positions.max())) >= longest:
        raise WrongLineError(f"the position {furthest} is not below max_seq_len = {longest}")
    if label not in (0, 1):
        raise WrongLineError(f"the label {label} is neither 0 nor 1")
    separators = np.flatnonzero(words == vocabulary.sep)
    if only_positive:
        if label != 1:
            raise WrongLineError(
                f"the label is {label}, and negative samples are made of lines with 1 only: "
                "pass generate_neg_sample=False if the data has its own"
            )
        if not len(separators):
            raise WrongLineError(f"no [SEP], which is {vocabulary.sep}, between two sentences")
    if not np.any((words != vocabulary.sep) & (words != vocabulary.cls)):
        raise WrongLineError("no word that could be masked")
    head = int(separators[0]) + 1 if len(separators) else n
    nothing = values[:0]
    return Line(words, sentences, positions, np.ones(n, np.uint8), nothing, nothing, label, head)


def _english(columns: list[bytes], vocabulary: Vocabulary) -> Line:
    words, present, sentences, masked, answers, weights, labels = map(_field, columns)
    if not len(words) == len(present) == len(sentences):
        raise WrongLineError(
            f"words, input_mask and sentences have the lengths {len(words)}, {len(present)} and {len(sentences)}"
        )
    if not len(masked) == len(answers) == len(weights):
        raise WrongLineError(
            f"masked positions, words and weights have the lengths {len(masked)}, {len(answers)} and {len(weights)}"
        )
    real = weights > 0  # the others only fill up to a fixed number
    masked, answers = masked[real], answers[real]
    if len(labels) != 1 or labels[0] not in (0, 1):
        raise WrongLineError("the label is neither 0 nor 1")
    if not len(masked):
        raise WrongLineError("no masked word with a weight")
    if np.any(masked < 0) or np.any(masked >= len(words)):
        raise WrongLineError(f"a masked position lies beyond the {len(words)} words")
    _check(answers, answers, vocabulary)
    _check(sentences, words, vocabulary)
    _check_sentences(sentences)
    return Line(
        words, sentences, np.arange(len(words)), (present > 0).astype(np.uint8), masked, answers, int(labels[0]), 0
    )


def _field(column: bytes) -> np.ndarray:
    count = column.count(b" ") + 1
    if b"." not in column:
        return _numbers(column, count)
    values = _numbers(column, count, np.float64)
    if np.any(values != np.floor(values)):
        raise WrongLineError("a number is not whole")
    return values.astype(np.int64)


def _numbers(text: bytes, count: int, kind: type = np.int64) -> np.ndarray:
    values: np.ndarray = np.empty(0)
    with suppress(ValueError):
        values = np.fromstring(text, kind, sep=" ")
    if len(values) != count:
        raise WrongLineError("not all is numbers with single spaces between them")
    return values


def _check(values: np.ndarray, words: np.ndarray, vocabulary: Vocabulary) -> None:
    if values.min() < 0 or words.min() < 0:
        raise WrongLineError("a number is negative")
    if (largest := int(words.max())) >= vocabulary.size:
        raise WrongLineError(f"the token id {largest} is beyond the vocabulary of {vocabulary.size}")


def _check_sentences(sentences: np.ndarray) -> None:
    if (last := int(sentences.max())) > 1:
        raise WrongLineError(f"the sentence {last} is neither 0 nor 1")


def read(paths: list[Path], vocabulary: Vocabulary, lang: str, complaints: Complaints, **rules: Unpack[Rules]) -> Lines:
    """The lines of all files, one behind the other."""
    found: list[Lines] = []
    for path in paths:
        texts = _texts(path)
        while block := list(islice(texts, _BLOCK)):
            found.append(_read_block(path, block, vocabulary, lang, complaints, **rules))
    return _joined(found or [_packed([])])


def _read_block(
    path: Path,
    block: list[tuple[int, bytes]],
    vocabulary: Vocabulary,
    lang: str,
    complaints: Complaints,
    **rules: Unpack[Rules],
) -> Lines:
    if lang == "ch" and (quick := parse_block([text for _, text in block], vocabulary, **rules)):
        starts, nothing = np.cumsum(np.append(0, quick.lengths)), np.empty(0, np.uint8)
        return Lines(
            starts, _small(quick.words), _small(quick.sentences), _small(quick.positions),
            np.ones(len(quick.words), np.uint8), np.zeros(len(starts), np.int64), nothing, nothing,
            _small(quick.labels), _small(quick.heads),
        )  # fmt: skip
    found: list[Line] = []
    for number, text in block:
        try:
            found.append(parse(text, vocabulary, lang, **rules))
        except WrongLineError as error:
            complaints.add(f"{path}, line {number}: {error}")
    return _packed(found)


def language(paths: list[Path]) -> str:
    """That of the first line whose number of fields is one of the two."""
    counts = (text.count(b";") + 1 for path in paths for _, text in _texts(path))
    return next((lang for count in counts for lang, known in FIELDS.items() if count == known), "ch")


def _texts(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with open(path, "rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if text := line.strip():
                    yield number, text
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read behind line {number}: {error}") from error


def _packed(lines: list[Line]) -> Lines:
    def flat(name: str) -> np.ndarray:
        return _small(np.concatenate([np.empty(0, np.int64), *(getattr(line, name) for line in lines)]))

    return Lines(
        np.cumsum([0, *(len(line.words) for line in lines)]),
        flat("words"), flat("sentences"), flat("positions"), flat("present"),
        np.cumsum([0, *(len(line.masked) for line in lines)]),
        flat("masked"), flat("answers"),
        _small(np.array([line.label for line in lines], np.int64)),
        _small(np.array([line.head for line in lines], np.int64)),
    )  # fmt: skip


def _small(values: np.ndarray) -> np.ndarray:
    return values.astype(np.min_scalar_type(values.max(initial=0)))


def _joined(blocks: list[Lines]) -> Lines:
    found = {}
    for field in fields(Lines):
        arrays = [getattr(block, field.name) for block in blocks]
        if field.name.endswith("starts"):
            ends = np.cumsum([0, *(array[-1] for array in arrays)])
            arrays = [np.zeros(1, np.int64), *(array[1:] + end for array, end in zip(arrays, ends, strict=False))]
        found[field.name] = np.concatenate(arrays)
    return Lines(**found)
