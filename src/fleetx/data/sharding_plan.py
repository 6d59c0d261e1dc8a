"""From the order of an epoch to the batches of each rank.

The order is cut into batches, one behind the other; the ranks take whole batches in turn, and one turn of all ranks is
a step. What the ranks have been given is therefore always a beginning of the order, and its length says where to go
on, for any number of ranks.

Every rank gets equally many batches, none of them empty, and every sample comes once. The last step may have less than
its ranks could take: it is shared out evenly. If it has fewer samples than there are ranks, it is shared out together
with the step before. Where that one has no room for them, because most of its batches have one sample, some batches are
larger than batch_size, in tokens too, at most twice as large; this is logged once.

Whoever goes on after any step with the same number of ranks gets the batches that would have come.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Protocol

import numpy as np

from fleetx.data.checks import check_whole
from fleetx.errors import UsageError

log = logging.getLogger(__name__)


class Cut(Protocol):
    """How long a batch may be. Batches are ranges of places in the order."""

    @property
    def batch_size(self) -> int: ...

    def ends(self, lengths: np.ndarray, first: int) -> list[int]:
        """Where the batches from `first` on end; the last one at the end of the order."""

    def fits(self, lengths: np.ndarray) -> bool:
        """May samples of these lengths be one batch?"""

    def full(self, lengths: np.ndarray) -> bool:
        """Is there no room left in it?"""


@dataclass(frozen=True)
class BySamples:
    batch_size: int

    def __post_init__(self) -> None:
        check_whole(batch_size=self.batch_size)

    def ends(self, lengths: np.ndarray, first: int) -> list[int]:
        total = len(lengths)
        return [*range(first + self.batch_size, total, self.batch_size), total] if first < total else []

    def fits(self, lengths: np.ndarray) -> bool:
        return len(lengths) <= self.batch_size

    def full(self, lengths: np.ndarray) -> bool:
        return len(lengths) == self.batch_size


@dataclass(frozen=True)
class ByTokens:
    """A batch has at most `batch_size` tokens, those that fill up short samples included."""

    batch_size: int
    longest: int

    def __post_init__(self) -> None:
        check_whole(batch_size=self.batch_size, max_seq_len=self.longest)
        if self.batch_size < self.longest:
            raise UsageError(
                f"batch_size = {self.batch_size} tokens cannot hold one sample of max_seq_len = {self.longest}: "
                "raise it, or pass in_tokens=False if it counts samples"
            )

    def ends(self, lengths: np.ndarray, first: int) -> list[int]:
        found, begin, widest = [], first, 0
        for place, length in enumerate(lengths[first:].tolist(), first):
            wider = length if length > widest else widest
            if place > begin and (place - begin + 1) * wider > self.batch_size:
                found.append(place)
                begin, wider = place, length
            widest = wider
        return [*found, len(lengths)] if first < len(lengths) else []

    def fits(self, lengths: np.ndarray) -> bool:
        return len(lengths) * int(lengths.max()) <= self.batch_size

    def full(self, lengths: np.ndarray) -> bool:
        return (len(lengths) + 1) * int(lengths.max()) > self.batch_size


def deal(cut: Cut, lengths: np.ndarray, first: int, ranks: int, *, drop_last: bool) -> np.ndarray:
    """Borders: rank r takes at step s the places from borders[s * ranks + r] up to the next border.

    With `drop_last` all batches are full and whatever makes no full step is left out.
    """
    borders = [first, *cut.ends(lengths, first)]
    if drop_last:
        if len(borders) > 1 and not cut.full(lengths[borders[-2] :]):
            borders.pop()
        return np.array(borders[: (len(borders) - 1) // ranks * ranks + 1])
    if len(borders) > 1:
        borders = _levelled(cut, lengths, borders, ranks)
    return np.array(borders)


def _levelled(cut: Cut, lengths: np.ndarray, borders: list[int], ranks: int) -> list[int]:
    """All steps but the last one, or two, stay as they were cut."""
    begin = (len(borders) - 2) // ranks * ranks  # with which batch the last step begins
    if (left := borders[-1] - borders[begin]) >= ranks:
        return borders[:begin] + _shared(cut, lengths, borders[begin:], ranks)
    if begin == 0:
        way_out = "use fewer ranks"
        if borders[0] > 0:
            way_out += f', or go on without these {left}: loader.set_epoch(state["epoch"] + 1)'
        raise UsageError(f"{left} samples are too few for {ranks} ranks, which need one each: {way_out}")
    too_few = len(borders) - 1 - begin
    begin -= ranks
    first, end = borders[begin], borders[-1]
    if end - first < 2 * ranks:  # most batches have one sample: there is hardly room for those that are left
        even = _even(first, end, ranks)
        if not all(cut.fits(lengths[a:b]) for a, b in pairwise(even)):
            _say_too_large(cut.batch_size)
        return borders[:begin] + even
    # Whoever goes on in the middle cuts anew from there, and must find one step too: so it lies behind as many batches
    # as the last step had.
    middle = max((first + end) // 2, borders[begin + too_few])
    earlier = [border for border in borders[begin:] if border < middle] + [middle]
    later = [middle, *cut.ends(lengths, middle)]
    return borders[:begin] + _shared(cut, lengths, earlier, ranks)[:-1] + _shared(cut, lengths, later, ranks)


def _shared(cut: Cut, lengths: np.ndarray, borders: list[int], ranks: int) -> list[int]:
    """One step, of at most as many batches as there are ranks and at least as many samples: a batch for each rank."""
    even = _even(borders[0], borders[-1], ranks)
    if all(cut.fits(lengths[a:b]) for a, b in pairwise(even)):
        return even
    found = list(borders)
    while len(found) < len(even):  # of batches by tokens, halves always fit
        widest = max(range(len(found) - 1), key=lambda i: found[i + 1] - found[i])
        found.insert(widest + 1, (found[widest] + found[widest + 1]) // 2)
    return found


def _even(first: int, end: int, ranks: int) -> list[int]:
    return np.linspace(first, end, ranks + 1).astype(int).tolist()


@cache
def _say_too_large(batch_size: int) -> None:
    log.warning(
        "batch_size = %d: some batches at the end of the epoch are larger: too few samples are left for another step",
        batch_size,
    )
