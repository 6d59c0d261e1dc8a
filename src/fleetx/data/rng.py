"""Random numbers that depend on what they are for, and on nothing else.

A number is a hash of a key (seed, epoch, purpose), of the sample, and of a counter. No generator is carried along, so
that it does not matter which rank or worker asks, in which order, or how often. The hash is SplitMix64 (Steele, Lea and
Flood, 2014), written out here because torch and numpy may change the streams of their generators.
"""

from __future__ import annotations

import numpy as np

_STEP = 0x9E3779B97F4A7C15
_ONE, _TWO = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def key(seed: int, epoch: int, purpose: str) -> int:
    """What every number for this purpose in this epoch begins with."""
    found = 0
    for part in (seed, epoch, int.from_bytes(purpose.encode())):
        found = _scramble_one(((found + part) * _STEP + 1) & _WORD)
    return found


def uniform(key: int, samples: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each sample and counter, as they broadcast."""
    return (_words(key, samples, counters) >> np.uint64(11)) * 2.0**-53


def permutation(key: int, size: int) -> np.ndarray:
    return np.argsort(_words(key, np.zeros(1, np.int64), np.arange(size)), kind="stable")


def _words(key: int, samples: np.ndarray, counters: np.ndarray) -> np.ndarray:
    # Arrays of integers wrap around without a word, which is what is wanted; single numpy numbers would warn.
    base = _scramble(np.atleast_1d(samples).astype(np.uint64) * np.uint64(_STEP) + np.uint64(key))
    return _scramble(base + np.atleast_1d(counters + 1).astype(np.uint64) * np.uint64(_STEP))


def _scramble(x: np.ndarray) -> np.ndarray:
    x ^= x >> np.uint64(30)
    x *= np.uint64(_ONE)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_TWO)
    x ^= x >> np.uint64(31)
    return x


def _scramble_one(x: int) -> int:
    x = (x ^ x >> 30) * _ONE & _WORD
    x = (x ^ x >> 27) * _TWO & _WORD
    return x ^ x >> 31
