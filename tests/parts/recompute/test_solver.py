"""The dynamic program against all solutions, simulated step by step."""

from __future__ import annotations

import itertools
import random

import pytest

from fleetx.measure.block_profile import BlockCost
from fleetx.parts.recompute.solver import Table


def solutions(i, j):
    """All trees over the blocks i to j whose last block is kept: a segment at the end would gain nothing."""
    if i > j:
        yield []
        return
    for rest in solutions(i + 1, j):
        yield [i, *rest]
    for k in range(i + 1, j + 1):
        for segment, rest in itertools.product(list(solutions(i, k - 1)), list(solutions(k, j))):
            yield [segment, *rest]


class Machine:
    """Simulates a tree: the peak, and the time it takes."""

    def __init__(self, blocks):
        self.blocks, self.live, self.peak, self.time = blocks, 0, 0, 0.0

    def hold(self, bytes_):
        self.live += bytes_
        self.peak = max(self.peak, self.live)

    def briefly(self, bytes_):
        self.peak = max(self.peak, self.live + bytes_)

    def simulate(self, tree, first, last, paid=True):
        """Forward and backward of the blocks first to last. paid: their input is kept anyway."""
        if not tree:
            return
        item, rest = tree[0], tree[1:]
        if isinstance(item, int):
            block = self.blocks[item]
            self.time += block.forward + block.backward
            self.hold(0 if paid else block.input_saved)
            self.briefly(block.saving_peak)
            self.hold(block.saved)
            self.simulate(rest, item + 1, last, item < last and self.blocks[item + 1].ready)
            self.hold(block.gradients)
            self.briefly(block.backward_peak)
            self.live -= block.saved + (0 if paid else block.input_saved)
            return
        end = ends(item) + 1
        self.hold(0 if paid else self.blocks[first].input)
        for i in range(first, end):
            block = self.blocks[i]
            self.time += block.forward
            self.briefly(block.forward_peak + (block.input if i > first else 0))
        read = {number: (maker, size) for block in self.blocks[first + 1 : end] for maker, number, size in block.reads}
        mine = {number for _, number, _ in self.blocks[first].reads}
        held = sum(b.loose for b in self.blocks[first + 1 : end])
        held += sum(size for number, (maker, size) in read.items() if maker < first and number not in mine)
        self.hold(held)
        self.simulate(rest, end, last, False)
        self.hold(self.blocks[end].input)  # the gradient of it
        self.simulate(item, first, end - 1)
        self.live -= held + self.blocks[end].input + (0 if paid else self.blocks[first].input)


def ends(tree):
    return tree[-1] if isinstance(tree[-1], int) else ends(tree[-1])


def simulated(blocks, tree):
    machine = Machine(blocks)
    machine.simulate(tree, 0, len(blocks) - 1)
    assert machine.live == sum(b.gradients for b in blocks)
    return machine.time, machine.peak


def chain(seed, n):
    draw = random.Random(seed)
    out = []
    for i in range(n):
        output = draw.randint(1, 6)
        saved = output + draw.randint(0, 10)
        passing = output + draw.randint(0, 4)
        input_ = draw.randint(1, 6)
        reads = [(i - 1, i, input_)] if i else []
        if i > 2 and draw.random() < 0.5:  # around two blocks
            reads.append((i - 3, 97 + i, 3))
        out.append(BlockCost(
            str(i), draw.randint(1, 9), draw.randint(1, 9), input_, draw.choice([0, input_]), saved, passing,
            max(saved, passing), draw.randint(0, 6), draw.randint(0, 3), draw.choice([0, 0, 2]), draw.random() < 0.5,
            tuple(reads)))  # fmt: skip
    return out


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_no_solution_within_the_bytes_is_faster(seed, n):
    blocks = chain(seed, n)
    every = [(*simulated(blocks, tree), tree) for tree in solutions(0, n - 1)]
    limit = max(peak for _, peak, _ in every) + 1
    table = Table(blocks, limit, slots=limit)
    assert table.least() == min(peak for _, peak, _ in every)
    for free in range(table.least(), limit + 1):
        time, peak = simulated(blocks, table.tree(free))
        assert peak <= free
        assert time == table.time(free) == min(t for t, p, _ in every if p <= free)


def test_slots_round_up_so_that_the_limit_holds():
    blocks = chain(3, 20)
    exact = Table(blocks, 400, slots=400)
    for slots in (30, 77, 200):
        rough = Table(blocks, 400, slots=slots)
        for free in range(rough.least(), 400, 13):
            time, peak = simulated(blocks, rough.tree(free))
            assert peak <= free
            assert time >= exact.time(free)


@pytest.mark.slow
def test_a_hundred_and_fifty_blocks():
    blocks = chain(1, 150)
    table = Table(blocks, 2000, slots=400)
    time, peak = simulated(blocks, table.tree(600))
    assert peak <= 600
    assert time == pytest.approx(table.time(600))
