"""Which words a BERT has to guess: 15 % of them, of which 80 % are hidden, 10 % are replaced and 10 % stay."""

from __future__ import annotations

import numpy as np

from fleetx.data import rng
from fleetx.data.vocabulary import Vocabulary

CHOSEN, HIDDEN, REPLACED = 0.15, 0.15 * 0.8, 0.15 * 0.9  # below the last: replaced; up to CHOSEN: kept


def mask(
    words: np.ndarray,  # (batch, width), changed in place
    present: np.ndarray,  # (batch, width), False where a row was filled up
    samples: np.ndarray,  # (batch,)
    vocabulary: Vocabulary,
    seed: int,
    epoch: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, columns and words of what was chosen, row by row. [CLS] and [SEP] never are; in a row at least one is.

    What happens to a word depends on seed, epoch, sample and column, not on the batch around it.
    """
    columns = np.arange(words.shape[1])
    draws = rng.uniform(rng.key(seed, epoch, "mask"), samples[:, None], columns)
    draws[~present | (words == vocabulary.cls) | (words == vocabulary.sep)] = 2.0
    unlucky = np.flatnonzero(draws.min(1) > CHOSEN)  # no word was chosen: the one that came nearest is hidden
    nearest = draws[unlucky].argmin(1)
    possible = draws[unlucky, nearest] < 1.0
    draws[unlucky[possible], nearest[possible]] = 0.0
    row, column = np.nonzero(draws <= CHOSEN)
    chosen, answers = draws[row, column], words[row, column]
    substitutes = rng.uniform(rng.key(seed, epoch, "substitute"), samples[row], column)
    others = vocabulary.ordinary[(substitutes * len(vocabulary.ordinary)).astype(np.int64)]
    words[row, column] = np.where(chosen <= HIDDEN, vocabulary.mask, np.where(chosen <= REPLACED, others, answers))
    return row, column, answers
