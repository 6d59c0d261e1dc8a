"""A row of pieces, cut so that none of the parts is long."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache


def partition(times: Sequence[float], sizes: Sequence[float], stages: int, allowed: Sequence[int]) -> list[int]:
    """Where the pieces after the first begin, so that the longest takes least; then, that the largest is smallest."""
    count = len(times)

    def cost(low: int, high: int) -> tuple[float, float]:
        return sum(times[low:high]), sum(sizes[low:high])

    @cache
    def best(low: int, pieces: int) -> tuple[tuple[float, float], tuple[int, ...]] | None:
        if pieces == 1:
            return cost(low, count), ()
        found = []
        for high in allowed:
            if high > low and (rest := best(high, pieces - 1)) is not None:
                (time, size), ends = rest
                mine = cost(low, high)
                found.append(((max(mine[0], time), max(mine[1], size)), (high, *ends)))
        return min(found, default=None)

    chosen = best(0, stages)
    assert chosen is not None
    return list(chosen[1])
