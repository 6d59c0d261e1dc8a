"""Parallel text in byte pair encoding, such as WMT16: a line is a source sentence, a tab and its translation.

Words are separated by spaces and looked up in a vocabulary with one word per line, including <s>, <e> and <unk>. A
batch has `src_word`, `src_pos` (n, source), `src_slf_attn_bias` (n, 1, 1, source), `trg_word`, `trg_pos` (n, target),
`trg_slf_attn_bias` (n, 1, target, target), `trg_src_attn_bias` (n, 1, 1, source), `lbl_word` and `lbl_weight`
(n, target). The source ends with <e>; the target begins with <s> and its labels end with <e>. Padding is <e> with
weight 0. The biases hide padding and, from each word of the target, the words after it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Unpack

import numpy as np
import torch

from fleetx.data import rng
from fleetx.data.checks import RecordErrors, check_int, check_names, listed_paths
from fleetx.data.fingerprint import array_bytes, fingerprint, sampled_bytes
from fleetx.data.loader import Batch, EpochOrder, Loader, LoaderOptions
from fleetx.data.sharding_plan import MaxTokens
from fleetx.errors import DataError

log = logging.getLogger(__name__)
VOCABULARY = "vocab_all.bpe.32000"
MARKS = ("<s>", "<e>", "<unk>")
HIDDEN = -1e9
_POOL = 200_000  # samples that are sorted by length together


class TranslationOptions(LoaderOptions, total=False):
    """Additional options of translation loaders.

    max_seq_len: pairs with a longer sentence are dropped; <s> and <e> count.
    vocab_size: the model's vocabulary size, which the vocabulary must not exceed.
    """

    max_seq_len: int
    vocab_size: int | None


def load_wmt16_dataset_from_file(
    src_vocab_fpath: str | Path,
    trg_vocab_fpath: str | Path,
    train_file_pattern: str | Path,
    batch_size: int = 2048,
    shuffle: bool = True,
    **options: Unpack[TranslationOptions],
) -> Loader:
    """Load all files that match a pattern, such as "data/train.*". batch_size counts tokens, including padding.

    A pair counts as many tokens as its longer sentence. Batches hold pairs of similar length, in random order.
    """
    where = Path(train_file_pattern)
    paths = [where] if where.is_file() else sorted(p for p in where.parent.glob(where.name) if p.is_file())
    if not paths:
        raise DataError(f"no file matches {where}")
    return _load(paths, where, Path(src_vocab_fpath), Path(trg_vocab_fpath), batch_size, shuffle, **options)


def translation_train(
    data_dir: str | Path, batch_size: int = 2048, shuffle: bool = True, **options: Unpack[TranslationOptions]
) -> Loader:
    """Load the files listed in the folder's train.txt, with the vocabulary vocab_all.bpe.32000 for both languages."""
    return _load_list(Path(data_dir), "train", batch_size, shuffle, options)


def translation_val(
    data_dir: str | Path, batch_size: int = 2048, shuffle: bool = False, **options: Unpack[TranslationOptions]
) -> Loader:
    """Load the files listed in the folder's val.txt. They are split among the ranks unless shard=False."""
    return _load_list(Path(data_dir), "val", batch_size, shuffle, options)


def _load_list(folder: Path, phase: str, batch_size: int, shuffle: bool, options: TranslationOptions) -> Loader:
    filelist = folder / f"{phase}.txt"
    vocabulary = folder / VOCABULARY
    return _load(listed_paths(filelist), filelist, vocabulary, vocabulary, batch_size, shuffle, **options)


def _load(
    paths: list[Path],
    origin: Path,
    src_vocab: Path,
    trg_vocab: Path,
    batch_size: int,
    shuffle: bool,
    *,
    max_seq_len: int = 256,
    vocab_size: int | None = None,
    **options: Unpack[LoaderOptions],
) -> Loader:
    known = ("batch_size", "shuffle", *TranslationOptions.__annotations__)
    check_names("a translation loader", options, known)
    limit = MaxTokens(batch_size, max_seq_len)
    if not paths:
        raise DataError(f"{origin} lists no files")
    if missing := [path for path in paths if not path.is_file()]:
        raise DataError(f"{missing[0]} does not exist; it is one of {len(paths)} files in {origin}")
    vocabularies = [read_words(path, vocab_size) for path in (src_vocab, trg_vocab)]
    errors = RecordErrors(options.get("on_error", "raise"))
    pairs = read(paths, vocabularies, errors)
    start, end = (vocabularies[1][mark] for mark in MARKS[:2])
    source = TranslationSource(pairs, start, end, max_seq_len, batch_size, errors.messages)
    return Loader(source, limit, shuffle=shuffle, **options)


def read_words(path: Path, max_size: int | None = None) -> dict[str, int]:
    """The id of each word: its line number, from 0."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the vocabulary {path}: {error}") from error
    while lines and not lines[-1]:
        lines.pop()
    words = {line.rstrip("\r"): number for number, line in enumerate(lines)}
    if missing := [mark for mark in MARKS if mark not in words]:
        raise DataError(f"the vocabulary {path} has no {', '.join(missing)}")
    if max_size is not None and len(lines) > max_size:
        raise DataError(
            f"the vocabulary {path} has {len(lines)} words, but the model {max_size}: create it with "
            f"vocab_size={len(lines)}"
        )
    return words


class Pairs(NamedTuple):
    """Sentences as ids, without marks, each language concatenated."""

    sources: np.ndarray
    targets: np.ndarray
    source_lengths: np.ndarray
    target_lengths: np.ndarray


def read(paths: list[Path], vocabularies: Sequence[dict[str, int]], errors: RecordErrors) -> Pairs:
    unknown = [vocabulary[MARKS[2]] for vocabulary in vocabularies]
    words: tuple[list[np.ndarray], ...] = ([], [])
    for path in paths:
        for number, line in _lines(path):
            fields = line.split("\t")
            if len(fields) != 2 or not all(field.strip() for field in fields):
                errors.add(f"{path}, line {number}: must be a sentence, a tab and its translation")
                continue
            for side, field in enumerate(fields):
                vocabulary, other = vocabularies[side], unknown[side]
                words[side].append(np.array([vocabulary.get(word, other) for word in field.split(" ")], np.int32))
    empty = [np.empty(0, np.int32)]
    joined = [np.concatenate(side or empty) for side in words]
    return Pairs(*joined, *(np.array([len(one) for one in side], np.int64) for side in words))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for number, line in enumerate(file, 1):
                if text := line.rstrip("\r\n"):
                    yield number, text
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path} after line {number}: {error}") from error


class TranslationSource:
    def __init__(self, pairs: Pairs, start: int, end: int, longest: int, batch_size: int, invalid: list[str]):
        check_int(max_seq_len=longest)
        self._pairs, self._start, self._end, self.invalid = pairs, start, end, invalid
        self._longest, self._batch_size = longest, batch_size
        self._src_starts, self._trg_starts = (
            np.append(0, np.cumsum(lengths)) for lengths in (pairs.source_lengths, pairs.target_lengths)
        )
        self._lengths = np.maximum(pairs.source_lengths + 1, pairs.target_lengths + 2)
        self._short = np.flatnonzero(self._lengths <= longest)
        if dropped := len(self._lengths) - len(self._short):
            log.warning("dropped %d pairs with a sentence longer than max_seq_len = %d", dropped, longest)
            if not len(self._short):
                raise DataError(f"all {dropped} pairs have a sentence longer than max_seq_len = {longest}")

    def __len__(self) -> int:
        return len(self._short)

    def fingerprint(self) -> str:
        pairs = self._pairs
        return fingerprint(
            self._start, self._end, self._longest, array_bytes(self._lengths),
            sampled_bytes(pairs.sources), sampled_bytes(pairs.targets),
        )  # fmt: skip

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> EpochOrder:
        """Shuffle the pairs, sort large pools of them by length, cut these into batches, and shuffle the batches."""
        rows = self._short
        if shuffle:
            rows = rows[rng.permutation(rng.key(seed, epoch, "order"), len(rows))]
            pools = [rows[i : i + _POOL] for i in range(0, len(rows), _POOL)]
            rows = np.concatenate([pool[np.argsort(self._lengths[pool], kind="stable")] for pool in pools])
            ends = MaxTokens(self._batch_size, self._longest).ends(self._lengths[rows], 0)
            batches = np.split(rows, ends[:-1])
            places = rng.permutation(rng.key(seed, epoch, "batches"), len(batches))
            rows = np.concatenate([batches[place] for place in places])
        return EpochOrder(rows[:, None], self._lengths[rows])

    def read(self, rows: np.ndarray, seed: int, epoch: int) -> tuple[Batch, list[str]]:
        indices = rows[:, 0].tolist()
        sources = [self._pairs.sources[self._src_starts[i] : self._src_starts[i + 1]] for i in indices]
        targets = [self._pairs.targets[self._trg_starts[i] : self._trg_starts[i + 1]] for i in indices]
        src_word, src_pos, present = self._padded([np.append(one, self._end) for one in sources])
        trg_word, trg_pos, _ = self._padded([np.append(self._start, one) for one in targets])
        lbl_word, _, weight = self._padded([np.append(one, self._end) for one in targets])
        hidden = np.where(present, 0.0, HIDDEN).astype(np.float32)[:, None, None, :]
        length = trg_word.shape[1]
        later = np.triu(np.full((length, length), HIDDEN, np.float32), 1)
        batch = {
            "src_word": src_word, "src_pos": src_pos, "src_slf_attn_bias": hidden,
            "trg_word": trg_word, "trg_pos": trg_pos,
            "trg_slf_attn_bias": np.tile(later, (len(indices), 1, 1, 1)), "trg_src_attn_bias": hidden.copy(),
            "lbl_word": lbl_word, "lbl_weight": weight.astype(np.float32),
        }  # fmt: skip
        return {name: torch.from_numpy(values) for name, values in batch.items()}, []

    def _padded(self, sentences: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Words, positions, and which of them are not padding."""
        lengths = np.array([len(one) for one in sentences])
        columns = np.arange(lengths.max())[None]
        present = columns < lengths[:, None]
        words = np.full(present.shape, self._end, np.int64)
        words[present] = np.concatenate(sentences)
        return words, np.where(present, columns, 0), present
