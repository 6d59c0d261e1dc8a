"""Tokenized BERT data: text that was converted to token ids beforehand.

A batch has, in this order, `src_ids`, `pos_ids`, `sent_ids` (n, width), `input_mask` (n, width, 1), which is 1 for
words and 0 for padding, `mask_label`, `mask_pos` (masked words, 1) and `labels` (n, 1). `mask_pos` indexes the
flattened batch: row * width + column. With masked="row", `mask_label` and `mask_pos` are (n, most masked words in a
row), `mask_pos` holds columns, and rows with fewer masked words are padded with -100 and 0. Such batches can be split
along the first dimension, as a pipeline does.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Unpack

import numpy as np
import torch

from fleetx.data import bert_lines, rng
from fleetx.data.bert_lines import FIELDS, Corpus
from fleetx.data.checks import RecordErrors, check_choice, check_int, check_names, listed_paths
from fleetx.data.fingerprint import array_bytes, fingerprint, sampled_bytes
from fleetx.data.loader import Batch, EpochOrder, Loader, LoaderOptions
from fleetx.data.sharding_plan import MaxSamples, MaxTokens
from fleetx.data.vocabulary import Vocabulary, mask, read_vocabulary
from fleetx.errors import DataError, UsageError

log = logging.getLogger(__name__)
MASKED = ("batch", "row")
IGNORED = -100  # label without a loss, as in torch


class BertOptions(LoaderOptions, total=False):
    """Additional options of BERT loaders.

    lang: "ch" for lines of 4 fields, which the loader masks, or "en" for 7 fields, which are masked already. By default
    it is detected.
    generate_neg_sample: for each line, add a sample with label 0 whose second sentence is from another line. The
    default is True for "ch".
    masked: "batch" or "row", the form of `mask_pos` and `mask_label`; see the top of this module.
    vocab_size: the model's vocabulary size, if smaller than the vocabulary. With it, "en" needs no vocabulary.
    cache_dir: a folder for parsed data, to reuse it later and to share it among all processes of a machine. Without it,
    each process holds the data in its own memory, about half the size of the text.
    """

    lang: str | None
    generate_neg_sample: bool | None
    masked: str
    vocab_size: int | None
    cache_dir: str | Path | None


def load_digital_dataset_from_file(
    data_dir: str | Path,
    vocab_path: str | Path,
    batch_size: int = 16,
    max_seq_len: int = 128,
    in_tokens: bool = False,
    shuffle: bool = True,
    **options: Unpack[BertOptions],
) -> Loader:
    """Load all files of a folder, .gz or plain, except the vocabulary and hidden files.

    Lines longer than max_seq_len are dropped. With `in_tokens`, batch_size counts tokens, including padding, instead of
    samples.
    """
    data_dir, vocab_path = Path(data_dir), Path(vocab_path)
    if not data_dir.is_dir():
        raise DataError(f"{data_dir} is not a folder: data_dir must be a folder with data files")
    paths = [path for path in sorted(data_dir.iterdir()) if path.is_file() and not path.name.startswith(".")]
    paths = [path for path in paths if not vocab_path.exists() or not path.samefile(vocab_path)]
    return _load(paths, data_dir, vocab_path, batch_size, max_seq_len, in_tokens, shuffle, **options)


def digital_train(
    data_dir: str | Path,
    batch_size: int = 4096,
    max_seq_len: int = 512,
    in_tokens: bool = True,
    shuffle: bool = True,
    **options: Unpack[BertOptions],
) -> Loader:
    """Load the files listed in the folder's train.txt, one per line, with the vocabulary vocab.txt.

    batch_size counts tokens. With in_tokens=False every batch has batch_size // max_seq_len samples.
    """
    return _load_list(Path(data_dir), "train", batch_size, max_seq_len, in_tokens, shuffle, options)


def digital_val(
    data_dir: str | Path,
    batch_size: int = 4096,
    max_seq_len: int = 512,
    in_tokens: bool = True,
    shuffle: bool = False,
    **options: Unpack[BertOptions],
) -> Loader:
    """Load the files listed in the folder's val.txt; otherwise like `digital_train`.

    They are split among the ranks unless shard=False. Every epoch masks the same words, to make losses comparable.
    """
    return _load_list(Path(data_dir), "val", batch_size, max_seq_len, in_tokens, shuffle, options)


def _load_list(
    folder: Path, phase: str, batch_size: int, max_seq_len: int, in_tokens: bool, shuffle: bool, options: BertOptions
) -> Loader:
    check_int(batch_size=batch_size, max_seq_len=max_seq_len)
    if batch_size < max_seq_len:
        raise UsageError(f"batch_size = {batch_size} counts tokens: must be at least max_seq_len = {max_seq_len}")
    filelist = folder / f"{phase}.txt"
    paths, vocab_path, same_masks = listed_paths(filelist), folder / "vocab.txt", phase == "val"
    size = batch_size if in_tokens else batch_size // max_seq_len
    return _load(paths, filelist, vocab_path, size, max_seq_len, in_tokens, shuffle, same_masks=same_masks, **options)


def _load(
    paths: list[Path],
    origin: Path,
    vocab_path: Path,
    batch_size: int,
    max_seq_len: int,
    in_tokens: bool,
    shuffle: bool,
    *,
    same_masks: bool = False,
    lang: str | None = None,
    generate_neg_sample: bool | None = None,
    masked: str = "batch",
    vocab_size: int | None = None,
    cache_dir: str | Path | None = None,
    **options: Unpack[LoaderOptions],
) -> Loader:
    known = ("batch_size", "max_seq_len", "in_tokens", "shuffle", *BertOptions.__annotations__)
    check_names("a BERT loader", options, known)
    check_choice("masked", masked, MASKED)
    check_int(max_seq_len=max_seq_len)
    if vocab_size is not None:
        check_int(vocab_size=vocab_size)
    limit = MaxTokens(batch_size, max_seq_len) if in_tokens else MaxSamples(batch_size)
    if not paths:
        raise DataError(f"{origin} has no data files")
    if missing := [path for path in paths if not os.path.isfile(path)]:  # unlike Path.is_file, works for any name
        raise DataError(
            f"{missing[0]} does not exist; it is one of {len(paths)} files in {origin}. If a download with shard_num "
            "left it out, list only the files of this node and pass replica=(fleet.local_rank(), workers on this node)"
        )
    lang = bert_lines.detect_language(paths) if lang is None else lang
    check_choice("lang", lang, tuple(FIELDS))
    if lang == "en" and vocab_size is not None:  # masked already: only the range of the ids matters
        vocabulary = Vocabulary(vocab_size, pad=0, cls=-1, sep=-1, mask=-1)
    else:
        vocabulary = read_vocabulary(vocab_path, vocab_size)
    if generate_neg_sample and lang == "en":
        raise UsageError(
            "generate_neg_sample=True is not supported for lines of 7 fields, which are masked already and have their "
            "own negative samples: remove it"
        )
    negatives = lang == "ch" if generate_neg_sample is None else generate_neg_sample
    errors = RecordErrors(options.get("on_error", "raise"))

    def read(errors: RecordErrors) -> Corpus:
        return bert_lines.read(paths, vocabulary, lang, errors, longest=max_seq_len, only_positive=negatives)

    if cache_dir is None:
        corpus = read(errors)
    else:
        settings = (vocabulary, lang, max_seq_len, negatives)
        corpus = bert_lines.load_or_create(Path(cache_dir), paths, settings, errors, read)
    source = BertSource(
        corpus, vocabulary, max_seq_len, errors.messages, negatives=negatives,
        premasked=lang == "en", by_rows=masked == "row", same_masks=same_masks,
    )  # fmt: skip
    return Loader(source, limit, shuffle=shuffle, **options)


class BertSource:
    """Samples built from lines. A row names two lines: one for the first sentence, one for the second."""

    def __init__(
        self, corpus: Corpus, vocabulary: Vocabulary, max_seq_len: int, invalid: list[str],
        *, negatives: bool, premasked: bool, by_rows: bool, same_masks: bool,
    ):  # fmt: skip
        self._corpus, self._vocabulary, self._longest, self.invalid = corpus, vocabulary, max_seq_len, invalid
        self._negatives, self._premasked = negatives, premasked
        self._by_rows, self._same_masks = by_rows, same_masks
        self._starts, self._masked_starts = (
            np.append(0, np.cumsum(counts, dtype=np.int64)) for counts in (corpus.lengths, corpus.masked_counts)
        )
        self._short = np.flatnonzero(corpus.lengths <= max_seq_len)
        if dropped := len(corpus.lengths) - len(self._short):
            log.warning("dropped %d lines longer than max_seq_len = %d", dropped, max_seq_len)
        if dropped and not len(self._short):
            raise DataError(f"all {dropped} lines are longer than max_seq_len = {max_seq_len}")
        if negatives and len(self._short) == 1:
            raise DataError("negative samples need at least two lines: pass generate_neg_sample=False")

    def __len__(self) -> int:
        return len(self._short)

    def fingerprint(self) -> str:
        corpus = self._corpus
        return fingerprint(
            self._vocabulary, self._longest, self._negatives, self._premasked,
            array_bytes(self._starts), array_bytes(corpus.heads), array_bytes(corpus.labels),
            sampled_bytes(corpus.words),
        )  # fmt: skip

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> EpochOrder:
        """Each line; with negatives, followed by its first sentence with the second sentence of another line."""
        first, lengths = self._short, self._corpus.lengths[self._short].astype(np.int64)
        rows = np.stack([first, first], 1)
        if self._negatives:
            # All lines form a random cycle, and each takes its second sentence from the next one.
            cycle = rng.permutation(rng.key(seed, epoch, "pair"), len(first)) if shuffle else np.arange(len(first))
            partner = np.empty_like(cycle)
            partner[cycle] = np.roll(cycle, -1)
            heads = self._corpus.heads[first].astype(np.int64)
            mixed = np.stack([first, first[partner]], 1)
            rows = np.stack([rows, mixed], 1).reshape(-1, 2)
            lengths = np.stack([lengths, heads + (lengths - heads)[partner]], 1).reshape(-1)
            fitting = lengths <= self._longest
            rows, lengths = rows[fitting], lengths[fitting]
        if shuffle:
            order = rng.permutation(rng.key(seed, epoch, "order"), len(rows))
            rows, lengths = rows[order], lengths[order]
        return EpochOrder(rows, lengths)

    def read(self, rows: np.ndarray, seed: int, epoch: int) -> tuple[Batch, list[str]]:
        corpus, vocabulary, starts = self._corpus, self._vocabulary, self._starts
        first, second = rows.T
        positive = first == second
        head = corpus.heads[first].astype(np.int64)
        begin, end = starts[second] + corpus.heads[second], starts[second + 1]
        lengths = head + end - begin
        size, width = len(rows), int(lengths.max())
        words = np.full((size, width), vocabulary.pad, np.int64)
        positions, sentences = np.zeros((2, size, width), np.int64)
        present = np.zeros((size, width), np.bool_)
        samples = zip(positive.tolist(), starts[first].tolist(), head.tolist(), begin.tolist(), end.tolist(),
                      lengths.tolist(), strict=True)  # fmt: skip
        for i, (is_line, a, h, b, e, n) in enumerate(samples):
            if is_line:
                words[i, :n] = corpus.words[a:e]
                positions[i, :n] = corpus.positions[a:e]
                sentences[i, :n] = corpus.sentences[a:e]
                present[i, :n] = corpus.present[a:e]
            else:
                words[i, :h] = corpus.words[a : a + h]
                words[i, h:n] = corpus.words[b:e]
                positions[i, :n] = range(n)
                sentences[i, h:n] = 1
                present[i, :n] = True
        if self._premasked:
            masked = self._answers(first)
        else:
            mask_epoch = 0 if self._same_masks else epoch
            masked = mask(words, present, 2 * first + ~positive, vocabulary, seed, mask_epoch)
        mask_label, mask_pos = self._form(*masked, size, width)
        batch = {
            "src_ids": words, "pos_ids": positions, "sent_ids": sentences,
            "input_mask": present.astype(np.float32)[:, :, None],
            "mask_label": mask_label, "mask_pos": mask_pos,
            "labels": np.where(positive, corpus.labels[first], 0).astype(np.int64)[:, None],
        }  # fmt: skip
        return {name: torch.from_numpy(values) for name, values in batch.items()}, []

    def _answers(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Row, column and original word of each word that the data has masked."""
        begin, end = self._masked_starts[indices], self._masked_starts[indices + 1]
        row = np.repeat(np.arange(len(indices)), end - begin)
        spans = [slice(a, b) for a, b in zip(begin.tolist(), end.tolist(), strict=True)]
        column, words = (
            np.concatenate([values[span] for span in spans]).astype(np.int64)
            for values in (self._corpus.masked, self._corpus.answers)
        )
        return row, column, words

    def _form(
        self, row: np.ndarray, column: np.ndarray, words: np.ndarray, size: int, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return `mask_label` and `mask_pos`."""
        if not self._by_rows:
            return words[:, None], (row * width + column)[:, None]
        counts = np.bincount(row, minlength=size)
        place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        # At least two columns, because (n, 1) would mean positions in the flattened batch.
        label = np.full((size, max(2, int(counts.max()))), IGNORED, np.int64)
        position = np.zeros_like(label)
        label[row, place], position[row, place] = words, column
        return label, position
