"""Which blocks of a chain to keep, which to run again, and in what groups: the least time within a number of bytes.

The dynamic programme of Beaumont et al. 2019 (arXiv 1911.13214), for chains whose blocks differ, with two ways to pass
a block: keep all that its backward needs, or keep its input alone. best(i, j) is the least time for forward and
backward of the blocks i to j, for every number of bytes that may be free:

    keep i:      forward i,             best(i + 1, j) beside what i keeps,              backward i
    segment:     forward i to k - 1,    best(k, j) beside what the segment holds,        best(i, k - 1)

Added to it: the gradients of the parameters, which grow while backward frees activations; what segments hold besides
their first input; and that an input costs nothing where it is kept already, which is why there are two tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetx.measure.block_profile import Block
from fleetx.parts.recompute.segments import Tree

CELLS = 100_000  # blocks times steps in which bytes are counted, rounded up: the programme takes about a second
Numbers = NDArray[np.float64]
Cuts = NDArray[np.int32]


class Table:
    """The answers for every number of bytes up to a limit."""

    def __init__(self, blocks: Sequence[Block], limit: int, slots: int | None = None):
        self.blocks, self.slots = blocks, (slots := slots or max(400, CELLS // len(blocks)))
        self.slot = max(limit / slots, 1.0)  # bytes
        self._gradients = [0, *accumulate(block.gradients for block in blocks)]
        self._loose = [0, *accumulate(block.loose for block in blocks)]
        self._forward = [0.0, *accumulate(block.forward for block in blocks)]
        self._more = [self._read_later(i) for i in range(len(blocks))]
        # For each i a row for each j from i on: the least time, and how: 0 keeps i, k ends a segment before k.
        # [0]: the input of i is still to be paid for. [1]: it is kept already.
        self._times: tuple[dict[int, Numbers], dict[int, Numbers]] = {}, {}
        self._cuts: tuple[dict[int, Cuts], dict[int, Cuts]] = {}, {}
        for i in reversed(range(len(blocks))):
            self._solve(i)

    # --- answers ----------------------------------------------------------------------------------
    def least(self) -> int | None:
        """The fewest bytes with which it can be done; None: with more than the limit."""
        possible = np.flatnonzero(np.isfinite(self._times[1][0][-1]))
        return int(np.ceil(possible[0] * self.slot)) if len(possible) else None

    def time(self, free: int) -> float:
        return float(self._times[1][0][-1][self._slots(free)])

    def tree(self, free: int) -> Tree:
        """The best way with so many bytes. The input of the first block is the user's."""
        return self._tree(0, len(self.blocks) - 1, self._slots(free), True)

    def _slots(self, free: int) -> int:
        return min(int(free / self.slot + 1e-9), self.slots)

    def _tree(self, i: int, j: int, m: int, paid: bool) -> Tree:
        out: Tree = []
        while i <= j:
            block, cut = self.blocks[i], int(self._cuts[paid][i][j - i, m])
            if cut == 0:
                out.append(i)
                m -= (0 if paid else self._up(block.takes)) + self._up(block.saved)
                i += 1
                paid = i <= j and self.blocks[i].ready
            else:
                m -= 0 if paid else self._up(block.input)
                out.append(self._tree(i, cut - 1, m - self._up(self._held(cut, j) + self._made(i, cut)), True))
                m -= self._up(self._made(i, cut))
                i, paid = cut, False
        return out

    # --- the programme ----------------------------------------------------------------------------
    def _solve(self, i: int) -> None:
        keep = self._keeping(i)
        segment, cuts = self._segments(i, keep)
        block = self.blocks[i]
        for paid in (False, True):
            a = keep if paid else _beside(keep, self._up(block.takes))
            b = segment if paid else _beside(segment, self._up(block.input))
            ends = cuts if paid else _beside(cuts, self._up(block.input), 0)
            self._times[paid][i] = np.minimum(a, b)
            self._cuts[paid][i] = np.where(b < a, ends, 0)

    def _keeping(self, i: int) -> Numbers:
        """The input being paid for: keep block i."""
        n, block = len(self.blocks), self.blocks[i]
        rest = np.zeros((n - i, self.slots + 1))
        if i + 1 < n:
            rest[1:] = _beside(self._times[self.blocks[i + 1].ready][i + 1], self._up(block.saved))
        after = [self._gradients[j + 1] - self._gradients[i] for j in range(i, n)]
        needed = [self._up(max(block.keeping, block.saved + block.undoing + grown)) for grown in after]
        enough = np.arange(self.slots + 1) >= np.array(needed)[:, None]
        return np.where(enough, rest + block.forward + block.backward, np.inf)

    def _segments(self, i: int, keep: Numbers) -> tuple[Numbers, Cuts]:
        """The input being paid for: the best segment that begins with block i."""
        n, free = len(self.blocks), np.arange(self.slots + 1)
        times, cuts = np.full_like(keep, np.inf), np.zeros(keep.shape, dtype=np.int32)
        passing = 0  # the most that is there on the way from i to k - 1
        for k in range(i + 1, n):
            last = self.blocks[k - 1]
            passing = max(passing, last.passing + (last.input if k - 1 > i else 0))
            made = self._made(i, k)
            left = free - np.array([self._up(self._held(k, j) + made) for j in range(k, n)])[:, None]
            inside = np.minimum(keep[k - 1 - i], times[k - 1 - i])  # best(i, k - 1)
            again = np.where(left >= 0, inside[np.maximum(left, 0)], np.inf)
            way = _beside(self._times[0][k], self._up(made)) + again + (self._forward[k] - self._forward[i])
            way[:, : self._up(passing)] = np.inf
            better = way < times[k - i :]
            times[k - i :][better] = way[better]
            cuts[k - i :][better] = k
        return times, cuts

    def _held(self, k: int, j: int) -> int:
        """What the blocks k to j leave to those before them: gradients of their parameters and of their input."""
        return self._gradients[j + 1] - self._gradients[k] + self.blocks[k].input

    def _made(self, i: int, k: int) -> int:
        """What a segment of the blocks i to k - 1 holds besides the input of i."""
        return self._loose[k] - self._loose[i + 1] + self._more[i][k - 1 - i]

    def _read_later(self, i: int) -> list[int]:
        """For each k from i on: what blocks i + 1 to k read that was made before i, and that i does not read."""
        known = {number for _, number, _ in self.blocks[i].reads}
        out, total = [0], 0
        for block in self.blocks[i + 1 :]:
            for maker, number, bytes_ in block.reads:
                if maker < i and number not in known:
                    known.add(number)
                    total += bytes_
            out.append(total)
        return out

    def _up(self, bytes_: float) -> int:
        return -int(-bytes_ // self.slot)


def _beside(values: NDArray[Any], taken: int, missing: float = np.inf) -> NDArray[Any]:
    """The same, when so many slots are taken by something else."""
    out = np.full_like(values, missing)
    if taken < values.shape[1]:
        out[:, taken:] = values[:, : values.shape[1] - taken]
    return out
