"""Parse tokenized BERT data into flat arrays.

Chinese, 4 fields:  words;sentences;positions;label
English, 7 fields:  words;input_mask;sentences;masked positions;masked words;masked weights;label

Semicolons separate fields, single spaces separate numbers.

All text is parsed once, up front: a .gz file has no random access, and batches cannot be formed before the lengths of
all lines are known. As small integers the data takes half the space of the text, later epochs need no parsing, and
invalid lines are found before training starts. Parsed data can be kept on disk and memory-mapped, so that all processes
of a machine share one copy.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fleetx.base.files import atomic_folder
from fleetx.data.checks import RecordErrors
from fleetx.data.vocabulary import Vocabulary
from fleetx.errors import DataError

FIELDS = {"ch": 4, "en": 7}
_CACHE_VERSION = 3  # of its format
_BLOCK = 128  # lines checked at once; larger blocks do not fit into the CPU cache
_NONE = np.empty(0, np.uint8)


class InvalidLineError(ValueError):
    """Says what is wrong with a line, but not where it is."""


class Corpus(NamedTuple):
    """Any number of lines, concatenated."""

    lengths: np.ndarray  # words per line
    words: np.ndarray
    sentences: np.ndarray
    positions: np.ndarray
    present: np.ndarray  # 0 for padding
    masked_counts: np.ndarray  # masked words per line; only English data has them
    masked: np.ndarray  # positions of masked words
    answers: np.ndarray  # original words at these positions
    labels: np.ndarray
    heads: np.ndarray  # words per line up to and including the first [SEP]; 0 for English


_EMPTY = Corpus(*[_NONE] * len(Corpus._fields))


def join(parts: Iterable[Corpus]) -> Corpus:
    """Concatenate, in the smallest dtypes that hold the values."""
    return Corpus(*(_shrink(np.concatenate(arrays)) for arrays in zip(_EMPTY, *parts, strict=True)))


def _shrink(values: np.ndarray) -> np.ndarray:
    return values.astype(np.min_scalar_type(values.max(initial=0)))


def read(paths: list[Path], vocabulary: Vocabulary, lang: str, errors: RecordErrors,
         *, longest: int, only_positive: bool) -> Corpus:  # fmt: skip
    """Parse all files; see `parse`."""
    blocks: list[Corpus] = []
    for path in paths:
        lines = _lines(path)
        while block := list(islice(lines, _BLOCK)):
            texts = [text for _, text in block]
            corpus, invalid = parse(texts, vocabulary, lang, longest=longest, only_positive=only_positive)
            blocks.append(corpus)
            errors.add(*(f"{path}, line {block[i][0]}: {invalid[i]}" for i in sorted(invalid)))
    return join(blocks)


def parse(texts: list[bytes], vocabulary: Vocabulary, lang: str, *, longest: int | None = None,
          only_positive: bool = False) -> tuple[Corpus, dict[int, str]]:  # fmt: skip
    """Parse lines; return the valid ones, and what is wrong with each of the others, by index.

    longest: the caller drops lines with more words than this; positions in the other lines must be less than this.
    only_positive: the caller builds negative samples, so lines must be positive and have two sentences.
    """
    parsed: dict[int, Corpus] = {}
    invalid: dict[int, str] = {}
    for i, text in enumerate(texts):
        try:
            parsed[i] = _split(text, lang)
        except InvalidLineError as error:
            invalid[i] = str(error)
    while parsed:
        corpus, wrong = _check(join(parsed.values()), vocabulary, lang, longest, only_positive)
        if not wrong:
            return corpus, invalid
        indices = list(parsed)
        for place, message in wrong.items():
            invalid[indices[place]] = message
            del parsed[indices[place]]
    return _EMPTY, invalid


def _split(text: bytes, lang: str) -> Corpus:
    columns = text.split(b";")
    if len(columns) != FIELDS[lang]:
        raise InvalidLineError(f"{len(columns)} fields instead of {FIELDS[lang]}")
    if lang == "en":
        return _split_english(columns)
    counts = [column.count(b" ") + 1 for column in columns]
    n = counts[0]
    if counts != [n, n, n, 1]:
        raise InvalidLineError(f"words, sentences, positions and label have lengths {counts}, expected n, n, n and 1")
    values = _numbers(text.replace(b";", b" "), 3 * n + 1)
    if b"-" in text:
        _check_not_negative(values)
    words, sentences, positions, label = values[:n], values[n : 2 * n], values[2 * n : 3 * n], values[3 * n :]
    # `_check` adds the rest, for many lines at once.
    return Corpus(np.array([n]), words, sentences, positions, _NONE, _NONE, _NONE, _NONE, label, _NONE)


def _split_english(columns: list[bytes]) -> Corpus:
    words, present, sentences, masked, answers, weights, label = map(_integers, columns)
    if not len(words) == len(present) == len(sentences):
        raise InvalidLineError(
            f"words, input_mask and sentences have lengths {len(words)}, {len(present)} and {len(sentences)}"
        )
    if not len(masked) == len(answers) == len(weights):
        raise InvalidLineError(
            f"masked positions, words and weights have lengths {len(masked)}, {len(answers)} and {len(weights)}"
        )
    real = weights > 0  # the others are padding
    masked, answers = masked[real], answers[real]
    if len(label) != 1:
        raise InvalidLineError(f"{len(label)} labels instead of 1")
    if not len(masked):
        raise InvalidLineError("no masked word has a weight above 0")
    _check_not_negative(words, sentences, masked, answers, label)
    if (last := int(masked.max())) >= len(words):
        raise InvalidLineError(f"masked position {last} is outside the {len(words)} words")
    return Corpus(
        np.array([len(words)]), words, sentences, np.arange(len(words)), (present > 0).astype(np.uint8),
        np.array([len(masked)]), masked, answers, label, np.zeros(1, np.uint8),
    )  # fmt: skip


def _integers(column: bytes) -> np.ndarray:
    count = column.count(b" ") + 1
    if b"." not in column:
        return _numbers(column, count)
    values = _numbers(column, count, np.float64)
    if np.any(values != np.floor(values)):
        raise InvalidLineError("a number is not an integer")
    return values.astype(np.int64)


def _numbers(text: bytes, count: int, dtype: type = np.int64) -> np.ndarray:
    try:
        values: np.ndarray = np.fromstring(text, dtype, sep=" ")
    except ValueError:
        values = _NONE
    if len(values) != count:
        raise InvalidLineError("expected only numbers, separated by single spaces")
    return values


def _check_not_negative(*arrays: np.ndarray) -> None:
    if any(array.min() < 0 for array in arrays):
        raise InvalidLineError("a number is negative")


def _check(
    corpus: Corpus, vocabulary: Vocabulary, lang: str, longest: int | None, only_positive: bool
) -> tuple[Corpus, dict[int, str]]:
    """Check the values of many lines at once: numpy calls for each line would take longer than parsing it.

    Returns the complete corpus, and a message for each invalid line.
    """
    ends = np.cumsum(corpus.lengths, dtype=np.int64)
    starts = ends - corpus.lengths
    words, labels = corpus.words, corpus.labels
    word, sentence, position = (
        np.maximum.reduceat(a, starts).astype(np.int64) for a in (words, corpus.sentences, corpus.positions)
    )
    if lang == "en":
        first = np.cumsum(corpus.masked_counts, dtype=np.int64) - corpus.masked_counts
        word = np.maximum(word, np.maximum.reduceat(corpus.answers, first))
    rules = [
        (word >= vocabulary.size, f"token id {{word}} is outside the vocabulary of {vocabulary.size}"),
        (sentence > 1, "sentence {sentence} is neither 0 nor 1"),
        (labels > 1, "label {label} is neither 0 nor 1"),
    ]
    if lang == "ch":
        separators = np.append(np.flatnonzero(words == vocabulary.sep), ends[-1])
        first = separators[np.searchsorted(separators, starts)]  # of each line; at or beyond its end if it has none
        heads = _shrink(np.minimum(first + 1, ends) - starts)
        corpus = corpus._replace(heads=heads, present=np.ones(len(words), np.uint8))
        ordinary = (words != vocabulary.sep) & (words != vocabulary.cls)
        if longest is not None:
            outside = (corpus.lengths <= longest) & (position >= longest)
            rules.append((outside, f"position {{position}} must be less than max_seq_len = {longest}"))
        if only_positive:
            own = "negative samples are built from lines with label 1: pass generate_neg_sample=False if the data has "
            rules.append((labels != 1, f"the label is {{label}}, but {own}its own"))
            rules.append((first >= ends, f"no [SEP] (id {vocabulary.sep}) between two sentences"))
        rules.append((~np.logical_or.reduceat(ordinary, starts), "no word can be masked"))
    return corpus, {  # the first rule wins
        int(i): message.format(word=word[i], sentence=sentence[i], position=position[i], label=labels[i])
        for wrong, message in reversed(rules)
        for i in np.flatnonzero(wrong)
    }


def detect_language(paths: list[Path]) -> str:
    """The language of the first line with 4 or 7 fields."""
    counts = (text.count(b";") + 1 for path in paths for _, text in _lines(path))
    return next((lang for count in counts for lang, known in FIELDS.items() if count == known), "ch")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Non-empty lines with their numbers."""
    number = 0
    try:
        with open(path, "rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if compressed else open(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if text := line.strip():
                    yield number, text
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {path} after line {number}: {error}") from error


# --- on disk ---------------------------------------------------------------------------------------
def load_or_create(folder: Path, paths: list[Path], settings: tuple[object, ...], errors: RecordErrors,
                   read: Callable[[RecordErrors], Corpus]) -> Corpus:  # fmt: skip
    """Return the result of `read` for these files and settings, from the cache if it is there.

    Only one process reads; the others wait for it. The cache may be in the data folder, because loaders ignore folders
    and hidden files.
    """
    files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    name = hashlib.sha256(repr((_CACHE_VERSION, files, settings)).encode()).hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, even if the process dies
        entry = folder / name
        if not entry.is_dir():
            skipped = RecordErrors("skip")  # another loader may skip the lines for which this one raises
            _write(read(skipped), skipped.messages, entry)
    errors.add(*json.loads((entry / "invalid.json").read_text()))
    return Corpus(*(np.load(entry / f"{name}.npy", mmap_mode="r") for name in Corpus._fields))


def _write(corpus: Corpus, invalid: list[str], entry: Path) -> None:
    with atomic_folder(entry) as temporary:
        for name, values in corpus._asdict().items():
            np.save(temporary / f"{name}.npy", values, allow_pickle=False)
        (temporary / "invalid.json").write_text(json.dumps(invalid))
