"""Chooses which blocks of a chain to keep and which to recompute, and in what groups: the least time in limited memory.

The dynamic program of Beaumont et al. 2019 (arXiv 1911.13214) for chains of different blocks. A block is either kept,
with everything its backward needs, or it is part of a segment that keeps only its input. best(i, j) is the least time
for forward and backward of the blocks i to j, for every number of free bytes:

    keep i:      forward i,             best(i + 1, j) next to what i keeps,             backward i
    segment:     forward i to k - 1,    best(k, j) next to what the segment holds,       best(i, k - 1)

In addition to the paper, it counts the gradients of the parameters, which grow while backward frees activations, and
what segments hold apart from their first input. An input that is kept anyway costs nothing, so there are two tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetx.measure.block_profile import BlockCost
from fleetx.parts.recompute.segments import Tree

CELLS = 100_000  # blocks times slots: the program takes about a second
Floats = NDArray[np.float64]
Cuts = NDArray[np.int32]


class Table:
    """The answers for every number of bytes up to a limit, counted in slots and rounded up."""

    def __init__(self, blocks: Sequence[BlockCost], limit: int, slots: int | None = None):
        self.blocks, self.slots = blocks, (slots := slots or max(400, CELLS // len(blocks)))
        self.slot = max(limit / slots, 1.0)  # bytes
        self._gradients = [0, *accumulate(block.gradients for block in blocks)]
        self._loose = [0, *accumulate(block.loose for block in blocks)]
        self._forward = [0.0, *accumulate(block.forward for block in blocks)]
        self._read_later = [self._reads_after(i) for i in range(len(blocks))]
        # For each i, a row for each j >= i: the least time, and how to get it: 0 keeps i, k ends a segment before k.
        # [0]: the input of i is not paid for yet. [1]: it is kept anyway.
        self._times: tuple[dict[int, Floats], dict[int, Floats]] = {}, {}
        self._cuts: tuple[dict[int, Cuts], dict[int, Cuts]] = {}, {}
        for i in reversed(range(len(blocks))):
            self._solve(i)

    # --- answers ----------------------------------------------------------------------------------
    def least(self) -> int | None:
        """The fewest bytes for which there is a solution. None if there is none within the limit."""
        possible = np.flatnonzero(np.isfinite(self._times[1][0][-1]))
        return int(np.ceil(possible[0] * self.slot)) if len(possible) else None

    def time(self, free: int) -> float:
        return float(self._times[1][0][-1][self._slots(free)])

    def tree(self, free: int) -> Tree:
        """The fastest solution. Its bytes do not include the input of the first block, which the user keeps anyway."""
        return self._tree(0, len(self.blocks) - 1, self._slots(free), True)

    def _slots(self, free: int) -> int:
        return min(int(free / self.slot + 1e-9), self.slots)

    def _tree(self, i: int, j: int, m: int, paid: bool) -> Tree:
        out: Tree = []
        while i <= j:
            block, cut = self.blocks[i], int(self._cuts[paid][i][j - i, m])
            if cut == 0:
                out.append(i)
                m -= (0 if paid else self._up(block.input_saved)) + self._up(block.saved)
                i += 1
                paid = i <= j and self.blocks[i].ready
            else:
                m -= 0 if paid else self._up(block.input)
                out.append(self._tree(i, cut - 1, m - self._up(self._after(cut, j) + self._held(i, cut)), True))
                m -= self._up(self._held(i, cut))
                i, paid = cut, False
        return out

    # --- the program ------------------------------------------------------------------------------
    def _solve(self, i: int) -> None:
        keep = self._keep(i)
        segment, cuts = self._segment(i, keep)
        block = self.blocks[i]
        for paid in (False, True):
            a = keep if paid else _shifted(keep, self._up(block.input_saved))
            b = segment if paid else _shifted(segment, self._up(block.input))
            ends = cuts if paid else _shifted(cuts, self._up(block.input), 0)
            self._times[paid][i] = np.minimum(a, b)
            self._cuts[paid][i] = np.where(b < a, ends, 0)

    def _keep(self, i: int) -> Floats:
        """Keep block i, whose input is paid for."""
        n, block = len(self.blocks), self.blocks[i]
        rest = np.zeros((n - i, self.slots + 1))
        if i + 1 < n:
            rest[1:] = _shifted(self._times[self.blocks[i + 1].ready][i + 1], self._up(block.saved))
        grown = [self._gradients[j + 1] - self._gradients[i] for j in range(i, n)]
        needed = [self._up(max(block.saving_peak, block.saved + block.backward_peak + g)) for g in grown]
        enough = np.arange(self.slots + 1) >= np.array(needed)[:, None]
        return np.where(enough, rest + block.forward + block.backward, np.inf)

    def _segment(self, i: int, keep: Floats) -> tuple[Floats, Cuts]:
        """The best segment that begins with block i, if the bytes of its input are counted already."""
        n, free = len(self.blocks), np.arange(self.slots + 1)
        times, cuts = np.full_like(keep, np.inf), np.zeros(keep.shape, dtype=np.int32)
        peak = 0  # of the forward from i to k - 1
        for k in range(i + 1, n):
            last = self.blocks[k - 1]
            peak = max(peak, last.forward_peak + (last.input if k - 1 > i else 0))
            held = self._held(i, k)
            left = free - np.array([self._up(self._after(k, j) + held) for j in range(k, n)])[:, None]
            inside = np.minimum(keep[k - 1 - i], times[k - 1 - i])  # best(i, k - 1)
            again = np.where(left >= 0, inside[np.maximum(left, 0)], np.inf)
            total = _shifted(self._times[0][k], self._up(held)) + again + (self._forward[k] - self._forward[i])
            total[:, : self._up(peak)] = np.inf
            better = total < times[k - i :]
            times[k - i :][better] = total[better]
            cuts[k - i :][better] = k
        return times, cuts

    def _after(self, k: int, j: int) -> int:
        """What exists after the backward of the blocks k to j: gradients of their parameters and of their input."""
        return self._gradients[j + 1] - self._gradients[k] + self.blocks[k].input

    def _held(self, i: int, k: int) -> int:
        """What a segment of the blocks i to k - 1 holds apart from the input of i."""
        return self._loose[k] - self._loose[i + 1] + self._read_later[i][k - 1 - i]

    def _reads_after(self, i: int) -> list[int]:
        """For each k >= i: bytes that the blocks i + 1 to k read, that were made before i, and that i does not read."""
        known = {tensor for _, tensor, _ in self.blocks[i].reads}
        out, total = [0], 0
        for block in self.blocks[i + 1 :]:
            for maker, tensor, size in block.reads:
                if maker < i and tensor not in known:
                    known.add(tensor)
                    total += size
            out.append(total)
        return out

    def _up(self, size: float) -> int:
        return -int(-size // self.slot)


def _shifted(values: NDArray[Any], taken: int, missing: float = np.inf) -> NDArray[Any]:
    """The values if something else takes up `taken` slots."""
    out = np.full_like(values, missing)
    if taken < values.shape[1]:
        out[:, taken:] = values[:, : values.shape[1] - taken]
    return out
