"""BERT's masking: of 15 % of the words, 80 % become [MASK], 10 % a random word, and 10 % stay."""

from __future__ import annotations

import numpy as np

from fleetx.data import rng
from fleetx.data.vocabulary import Vocabulary

SELECTED, MASKED, REPLACED = 0.15, 0.15 * 0.8, 0.15 * 0.9  # thresholds for one uniform number per word


def mask(
    words: np.ndarray,  # (batch, width), changed in place
    present: np.ndarray,  # (batch, width), False for padding
    samples: np.ndarray,  # (batch,)
    vocabulary: Vocabulary,
    seed: int,
    epoch: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mask words; return row, column and original of each, in row order.

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
