"""BERT's digital data: text that was turned into numbers before.

A batch has, in this order, `src_ids`, `pos_ids`, `sent_ids` (n, width), `input_mask` (n, width, 1), which is 1 where
there is a word and else 0, `mask_label`, `mask_pos` (masked words, 1), and `labels` (n, 1). `mask_pos` counts through
the whole batch, row * width + column. With masked="row" both are (n, most in a row), `mask_pos` counts within rows, and
-100 and 0 fill up rows with fewer: batches that can be divided, as a pipeline does.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Unpack

import numpy as np
import torch

from fleetx.data import bert_lines, cache, rng
from fleetx.data.bert_lines import FIELDS, Lines
from fleetx.data.checks import check_choice, check_names, check_whole
from fleetx.data.errors import Complaints
from fleetx.data.fingerprint import all_of, fingerprint, pieces_of
from fleetx.data.loader import Batch, Loader, LoaderOptions, Plan
from fleetx.data.masking import mask
from fleetx.data.sharding_plan import BySamples, ByTokens
from fleetx.data.vocabulary import Vocabulary, read_vocabulary
from fleetx.errors import DataError, UsageError

log = logging.getLogger(__name__)
MASKED = ("batch", "row")
IGNORED = -100  # a label that counts for nothing, as everywhere in torch


class DigitalOptions(LoaderOptions, total=False):
    """What loaders of digital data can be told besides.

    lang: "ch" for lines of 4 fields, which are masked here, "en" for 7, which are masked already; else the lines say.
    generate_neg_sample: one more sample for each line, whose second sentence is another line's, with the label 0.
    Chinese data has them unless this is False.
    masked: how masked words are said, see above.
    vocab_size: how many words the model knows, where they are fewer than those of the vocabulary.
    cache_dir: where to keep what was read, for the next time and for all workers of a machine together; without it
    each worker holds it in its own memory, about half as large as the text.
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
    **options: Unpack[DigitalOptions],
) -> Loader:
    """All files of a folder, .gz or plain, but the vocabulary and hidden ones. Lines over max_seq_len are left out.

    With `in_tokens` batch_size counts tokens, those that fill up included, instead of samples.
    """
    data_dir, vocab_path = Path(data_dir), Path(vocab_path)
    if not data_dir.is_dir():
        raise DataError(f"{data_dir} is no folder: data_dir is one with files of digital data in it")
    paths = [path for path in sorted(data_dir.iterdir()) if path.is_file() and not path.name.startswith(".")]
    paths = [path for path in paths if not vocab_path.exists() or not path.samefile(vocab_path)]
    return _load(paths, data_dir, vocab_path, batch_size, max_seq_len, in_tokens, shuffle, **options)


def digital_train(
    data_dir: str | Path,
    batch_size: int = 4096,
    max_seq_len: int = 512,
    in_tokens: bool = True,
    shuffle: bool = True,
    **options: Unpack[DigitalOptions],
) -> Loader:
    """The files that train.txt in the folder lists, one per line; its vocabulary is vocab.txt.

    batch_size counts tokens. With in_tokens=False there are always batch_size // max_seq_len samples in a batch.
    """
    return _listed(Path(data_dir), "train", batch_size, max_seq_len, in_tokens, shuffle, options)


def digital_val(
    data_dir: str | Path,
    batch_size: int = 4096,
    max_seq_len: int = 512,
    in_tokens: bool = True,
    shuffle: bool = False,
    **options: Unpack[DigitalOptions],
) -> Loader:
    """The files that val.txt in the folder lists; the rest as in `digital_train`.

    Each rank gets its share of them, unless shard=False. Every epoch masks the same words, so that losses compare.
    """
    return _listed(Path(data_dir), "val", batch_size, max_seq_len, in_tokens, shuffle, options)


def _listed(
    folder: Path, phase: str, batch_size: int, max_seq_len: int, in_tokens: bool, shuffle: bool, options: DigitalOptions
) -> Loader:
    check_whole(batch_size=batch_size, max_seq_len=max_seq_len)
    if batch_size < max_seq_len:
        raise UsageError(f"batch_size = {batch_size} counts tokens, and must be at least max_seq_len = {max_seq_len}")
    filelist = folder / f"{phase}.txt"
    try:
        paths = [folder / line.split()[0] for line in filelist.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise DataError(f"the list of files {filelist} cannot be read: {error.strerror}") from error
    size = batch_size if in_tokens else batch_size // max_seq_len
    vocab_path, same_masks = folder / "vocab.txt", phase == "val"
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
    known = ("batch_size", "max_seq_len", "in_tokens", "shuffle", *DigitalOptions.__annotations__)
    check_names("a loader of digital data", options, known)
    check_choice("masked", masked, MASKED)
    check_whole(max_seq_len=max_seq_len)
    if vocab_size is not None:
        check_whole(vocab_size=vocab_size)
    cut = ByTokens(batch_size, max_seq_len) if in_tokens else BySamples(batch_size)
    if not paths:
        raise DataError(f"{origin} names no file of digital data")
    if absent := [path for path in paths if not path.is_file()]:
        raise DataError(
            f"{absent[0]}, one of {len(paths)} files of {origin}, is not there. If it was left out by a download with "
            "shard_num, list the files of this node alone, and pass replica=(fleet.local_rank(), workers on this node)"
        )
    vocabulary = read_vocabulary(vocab_path, vocab_size)
    found_lang = bert_lines.language(paths) if lang is None else lang
    check_choice("lang", found_lang, tuple(FIELDS))
    if generate_neg_sample and found_lang == "en":
        raise UsageError("generate_neg_sample is for lines of 4 fields; those of 7 are masked, and have their own")
    negatives = found_lang == "ch" if generate_neg_sample is None else generate_neg_sample
    complaints = Complaints(options.get("on_error", "raise"))

    def read(into: Complaints) -> Lines:
        return bert_lines.read(paths, vocabulary, found_lang, into, longest=max_seq_len, only_positive=negatives)

    if cache_dir is None:
        found = read(complaints)
    else:
        about = (vocabulary, found_lang, max_seq_len, negatives)
        found = cache.kept(Path(cache_dir), paths, about, complaints, read)
    source = Digital(
        found, vocabulary, max_seq_len, complaints.found, negatives=negatives,
        masked_before=found_lang == "en", by_rows=masked == "row", same_masks=same_masks,
    )  # fmt: skip
    return Loader(source, cut, shuffle=shuffle, **options)


class Digital:
    """Samples made of lines: a row says whose first sentence, and whose second."""

    def __init__(
        self, all_lines: Lines, vocabulary: Vocabulary, max_seq_len: int, broken: list[str],
        *, negatives: bool, masked_before: bool, by_rows: bool, same_masks: bool,
    ):  # fmt: skip
        self._lines, self._vocabulary, self._longest, self.broken = all_lines, vocabulary, max_seq_len, broken
        self._negatives, self._masked_before = negatives, masked_before
        self._by_rows, self._same_masks = by_rows, same_masks
        lengths = np.diff(all_lines.starts)
        self._short = np.flatnonzero(lengths <= max_seq_len)
        if left_out := len(lengths) - len(self._short):
            log.warning("%d lines are longer than max_seq_len = %d and left out", left_out, max_seq_len)
        if len(lengths) and not len(self._short):
            raise DataError(f"all {left_out} lines are longer than max_seq_len = {max_seq_len}")
        if negatives and len(self._short) == 1:
            raise DataError("negative samples need two lines at least: pass generate_neg_sample=False")

    def __len__(self) -> int:
        return len(self._short)

    def fingerprint(self) -> str:
        plan = all_of(self._lines.starts), all_of(self._lines.heads), all_of(self._lines.labels)
        return fingerprint(
            self._vocabulary, self._longest, self._negatives, self._masked_before, *plan, pieces_of(self._lines.words)
        )

    def plan(self, seed: int, epoch: int, *, shuffle: bool) -> Plan:
        """Each line, and with negatives behind it its first sentence with the second one of another."""
        first, lengths = self._short, np.diff(self._lines.starts)[self._short]
        rows = np.stack([first, first], 1)
        if self._negatives:
            # In a circle of all lines each takes its second sentence from the next one.
            circle = rng.permutation(rng.key(seed, epoch, "pair"), len(first)) if shuffle else np.arange(len(first))
            partner = np.empty_like(circle)
            partner[circle] = np.roll(circle, -1)
            heads = self._lines.heads[first].astype(np.int64)
            mixed = np.stack([first, first[partner]], 1)
            rows = np.stack([rows, mixed], 1).reshape(-1, 2)
            lengths = np.stack([lengths, heads + (lengths - heads)[partner]], 1).reshape(-1)
            fitting = lengths <= self._longest
            rows, lengths = rows[fitting], lengths[fitting]
        if shuffle:
            order = rng.permutation(rng.key(seed, epoch, "order"), len(rows))
            rows, lengths = rows[order], lengths[order]
        return Plan(rows, lengths)

    def read(self, rows: np.ndarray, seed: int, epoch: int) -> tuple[Batch, list[str]]:
        positive = rows[:, 0] == rows[:, 1]
        all_lines, vocabulary = self._lines, self._vocabulary
        first, second = rows.T
        head = all_lines.heads[first].astype(np.int64)
        begin, end = all_lines.starts[second] + all_lines.heads[second], all_lines.starts[second + 1]
        lengths = head + end - begin
        size, width = len(rows), int(lengths.max())
        words = np.full((size, width), vocabulary.pad, np.int64)
        positions, sentences = np.zeros((2, size, width), np.int64)
        present = np.zeros((size, width), np.bool_)
        pieces = zip(positive.tolist(), all_lines.starts[first].tolist(), head.tolist(), begin.tolist(), end.tolist(),
                     lengths.tolist(), strict=True)  # fmt: skip
        for i, (whole, a, h, b, e, n) in enumerate(pieces):
            if whole:
                words[i, :n] = all_lines.words[a:e]
                positions[i, :n] = all_lines.positions[a:e]
                sentences[i, :n] = all_lines.sentences[a:e]
                present[i, :n] = all_lines.present[a:e]
            else:
                words[i, :h] = all_lines.words[a : a + h]
                words[i, h:n] = all_lines.words[b:e]
                positions[i, :n] = range(n)
                sentences[i, h:n] = 1
                present[i, :n] = True
        if self._masked_before:
            chosen = self._answers(first)
        else:
            same = 0 if self._same_masks else epoch
            chosen = mask(words, present, 2 * first + ~positive, vocabulary, seed, same)
        labels = np.where(positive, all_lines.labels[first], 0).astype(np.int64)
        mask_label, mask_pos = self._chosen(*chosen, size, width)
        found = {
            "src_ids": words, "pos_ids": positions, "sent_ids": sentences,
            "input_mask": present.astype(np.float32)[:, :, None],
            "mask_label": mask_label, "mask_pos": mask_pos, "labels": labels[:, None],
        }  # fmt: skip
        return {name: torch.from_numpy(values) for name, values in found.items()}, []

    def _answers(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, columns and words of what was masked when the data was made."""
        begin, end = self._lines.masked_starts[which], self._lines.masked_starts[which + 1]
        row = np.repeat(np.arange(len(which)), end - begin)
        spans = [slice(a, b) for a, b in zip(begin.tolist(), end.tolist(), strict=True)]
        column, words = (
            np.concatenate([values[span] for span in spans]).astype(np.int64)
            for values in (self._lines.masked, self._lines.answers)
        )
        return row, column, words

    def _chosen(
        self, row: np.ndarray, column: np.ndarray, words: np.ndarray, size: int, width: int
    ) -> tuple[np.ndarray, np.ndarray]:
        if not self._by_rows:
            return words[:, None], (row * width + column)[:, None]
        counts = np.bincount(row, minlength=size)
        place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        # Two at least: (n, 1) would look like places in the batch.
        label = np.full((size, max(2, int(counts.max()))), IGNORED, np.int64)
        position = np.zeros_like(label)
        label[row, place], position[row, place] = words, column
        return label, position
