"""Split the order of an epoch into batches for each rank.

The order is cut into consecutive batches, and the ranks take them in turn; one batch for every rank is a step. What the
ranks have received is therefore always a prefix of the order, and its length is enough to resume with any number of
ranks. With the same number of ranks, resuming after any step gives the batches that would have followed.

Every rank gets the same number of batches, no batch is empty, and every sample occurs once. The last step may hold less
than the ranks could take; it is split evenly. If it has fewer samples than there are ranks, it is split together with
the step before it. If that step has no room because most of its batches have one sample, some batches exceed
batch_size, whether it counts samples or tokens, at most by a factor of two; this is logged once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Protocol

import numpy as np

from fleetx.data.checks import check_int
from fleetx.errors import UsageError

log = logging.getLogger(__name__)


class BatchLimit(Protocol):
    """How large a batch may be. Batches are ranges of the order."""

    @property
    def batch_size(self) -> int: ...

    def ends(self, lengths: np.ndarray, first: int) -> list[int]:
        """Ends of the batches from `first` on; the last one is the end of the order."""

    def fits(self, lengths: np.ndarray) -> bool:
        """Whether samples of these lengths can form a batch."""

    def full(self, lengths: np.ndarray) -> bool:
        """Whether there is no room for another sample."""


@dataclass(frozen=True)
class MaxSamples:
    batch_size: int

    def __post_init__(self) -> None:
        check_int(batch_size=self.batch_size)

    def ends(self, lengths: np.ndarray, first: int) -> list[int]:
        total = len(lengths)
        return [*range(first + self.batch_size, total, self.batch_size), total] if first < total else []

    def fits(self, lengths: np.ndarray) -> bool:
        return len(lengths) <= self.batch_size

    def full(self, lengths: np.ndarray) -> bool:
        return len(lengths) == self.batch_size


@dataclass(frozen=True)
class MaxTokens:
    """A batch has at most `batch_size` tokens, including padding."""

    batch_size: int
    longest: int

    def __post_init__(self) -> None:
        check_int(batch_size=self.batch_size, max_seq_len=self.longest)
        if self.batch_size < self.longest:
            raise UsageError(
                f"batch_size = {self.batch_size} tokens cannot hold a sample of max_seq_len = {self.longest}: "
                "increase it, or pass in_tokens=False if it counts samples"
            )

    def ends(self, lengths: np.ndarray, first: int) -> list[int]:
        result, start, longest = [], first, 0
        for place, length in enumerate(lengths[first:].tolist(), first):
            new_longest = length if length > longest else longest
            if place > start and (place - start + 1) * new_longest > self.batch_size:
                result.append(place)
                start, new_longest = place, length
            longest = new_longest
        return [*result, len(lengths)] if first < len(lengths) else []

    def fits(self, lengths: np.ndarray) -> bool:
        return len(lengths) * int(lengths.max()) <= self.batch_size

    def full(self, lengths: np.ndarray) -> bool:
        return (len(lengths) + 1) * int(lengths.max()) > self.batch_size


def batch_bounds(limit: BatchLimit, lengths: np.ndarray, first: int, ranks: int, *, drop_last: bool) -> np.ndarray:
    """Bounds of all batches from `first` on. At step s, rank r reads from bounds[s * ranks + r] up to the next bound.

    With `drop_last` all batches are full, and samples that do not fill a step are dropped.
    """
    bounds = [first, *limit.ends(lengths, first)]
    if drop_last:
        if len(bounds) > 1 and not limit.full(lengths[bounds[-2] :]):
            bounds.pop()
        return np.array(bounds[: (len(bounds) - 1) // ranks * ranks + 1])
    if len(bounds) > 1:
        bounds = _balance_tail(limit, lengths, bounds, ranks)
    return np.array(bounds)


def _balance_tail(limit: BatchLimit, lengths: np.ndarray, bounds: list[int], ranks: int) -> list[int]:
    """Split the last step, or the last two, so that every rank has a batch."""
    start = (len(bounds) - 2) // ranks * ranks  # the first batch of the last step
    if (left := bounds[-1] - bounds[start]) >= ranks:
        return bounds[:start] + _split_step(limit, lengths, bounds[start:], ranks)
    if start == 0:
        fix = "use fewer ranks"
        if bounds[0] > 0:
            fix += f', or skip these {left}: loader.set_epoch(state["epoch"] + 1)'
        raise UsageError(f"{left} samples are too few for {ranks} ranks, which need at least one each: {fix}")
    in_last = len(bounds) - 1 - start
    start -= ranks
    first, end = bounds[start], bounds[-1]
    if end - first < 2 * ranks:  # most batches have one sample, so there is hardly any room for the rest
        even = _even(first, end, ranks)
        if not all(limit.fits(lengths[a:b]) for a, b in pairwise(even)):
            _warn_too_large(limit.batch_size)
        return bounds[:start] + even
    # A run that resumes at `middle` cuts its batches from there, and these too must be a single step. So `middle` comes
    # after at least as many batches as the last step had.
    middle = max((first + end) // 2, bounds[start + in_last])
    earlier = [bound for bound in bounds[start:] if bound < middle] + [middle]
    later = [middle, *limit.ends(lengths, middle)]
    return bounds[:start] + _split_step(limit, lengths, earlier, ranks)[:-1] + _split_step(limit, lengths, later, ranks)


def _split_step(limit: BatchLimit, lengths: np.ndarray, bounds: list[int], ranks: int) -> list[int]:
    """Split a step of at most `ranks` batches and at least `ranks` samples into one batch per rank."""
    even = _even(bounds[0], bounds[-1], ranks)
    if all(limit.fits(lengths[a:b]) for a, b in pairwise(even)):
        return even
    result = list(bounds)
    while len(result) < len(even):  # half of a batch always fits
        largest = max(range(len(result) - 1), key=lambda i: result[i + 1] - result[i])
        result.insert(largest + 1, (result[largest] + result[largest + 1]) // 2)
    return result


def _even(first: int, end: int, ranks: int) -> list[int]:
    return np.linspace(first, end, ranks + 1).astype(int).tolist()


@cache
def _warn_too_large(batch_size: int) -> None:
    log.warning(
        "some batches at the end of the epoch are larger than batch_size = %d, because the samples left over are too "
        "few for another step",
        batch_size,
    )
