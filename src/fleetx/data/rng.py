"""Stateless random numbers: each is a hash of (seed, epoch, purpose), a sample and a counter.

Because there is no generator state, results do not depend on which rank or worker asks, in which order, or how often.
The hash is SplitMix64 (Steele, Lea and Flood, 2014), implemented here because torch and numpy may change the streams of
their generators.
"""

from __future__ import annotations

import numpy as np

_STEP = 0x9E3779B97F4A7C15
_ONE, _TWO = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def key(seed: int, epoch: int, purpose: str) -> int:
    """The key of one stream of numbers."""
    result = 0
    for part in (seed, epoch, int.from_bytes(purpose.encode())):
        word = ((result + part) * _STEP + 1) & _WORD
        result = int(_scramble(np.array([word], np.uint64))[0])
    return result


def uniform(key: int, samples: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1), one for each sample and counter; the two are broadcast."""
    return (_words(key, samples, counters) >> np.uint64(11)) * 2.0**-53


def permutation(key: int, size: int) -> np.ndarray:
    return np.argsort(_words(key, np.zeros(1, np.int64), np.arange(size)), kind="stable")


def _words(key: int, samples: np.ndarray, counters: np.ndarray) -> np.ndarray:
    # Integer arrays wrap around silently, as intended here; numpy scalars would warn.
    base = _scramble(np.atleast_1d(samples).astype(np.uint64) * np.uint64(_STEP) + np.uint64(key))
    return _scramble(base + np.atleast_1d(counters + 1).astype(np.uint64) * np.uint64(_STEP))


def _scramble(x: np.ndarray) -> np.ndarray:
    x ^= x >> np.uint64(30)
    x *= np.uint64(_ONE)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_TWO)
    x ^= x >> np.uint64(31)
    return x
