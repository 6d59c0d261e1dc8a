"""From the order of an epoch to the batches of each rank.

The order is cut into batches, one behind the other; the ranks take whole batches in turn, and one turn of all ranks is
a step. What the ranks have been given is therefore always a beginning of the order, and its length says where to go
on, for any number of ranks.

Every rank gets equally many batches, none of them empty, and every sample comes once. The last step may have less than
its ranks could take: it is shared out evenly. If it has fewer samples than there are ranks, it is shared out together
with the step before.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from fleetx.data.broken import check_whole
from fleetx.errors import UsageError


class Cut(Protocol):
    """How long a batch may be. Batches are ranges of places in the order."""

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
    batches = len(borders) - 1
    begin = (batches - 1) // ranks * ranks  # with which batch the last step begins
    steps = 1
    if borders[-1] - borders[begin] < ranks:
        if begin == 0:
            left, way_out = borders[-1] - borders[0], "use fewer ranks"
            if borders[0] > 0:
                way_out += ', or go on with the next epoch: load {**state, "epoch": epoch + 1, "position": 0}'
            raise UsageError(f"{left} samples are too few for {ranks} ranks, which need one each: {way_out}")
        begin -= ranks
        # With a batch size of one there is no room for them at all: some batches of the last step are then of two.
        steps = 2 if borders[-1] - borders[begin] >= 2 * ranks else 1
    kept, tail = borders[:begin], borders[begin:]
    even = np.linspace(tail[0], tail[-1], steps * ranks + 1).astype(int).tolist()
    if len(tail) > len(even) or all(cut.fits(lengths[a:b]) for a, b in pairwise(even)):
        return kept + even
    while len(tail) < len(even):  # of batches by tokens, halves always fit
        widest = max(range(len(tail) - 1), key=lambda i: tail[i + 1] - tail[i])
        tail.insert(widest + 1, (tail[widest] + tail[widest + 1]) // 2)
    return kept + tail
