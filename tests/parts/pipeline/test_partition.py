"""The cut that is found automatically."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss

from fleetx import StrategyError, fleet
from fleetx.parts.pipeline.cut_points import partition
from training import sgd

numbers = st.lists(st.integers(1, 9), min_size=4, max_size=9)


@given(numbers, st.integers(2, 4), st.data())
def test_no_other_cut_has_a_shorter_longest_stage(times, stages, draw):
    allowed = draw.draw(st.sets(st.integers(1, len(times) - 1), min_size=stages - 1))
    sizes = [1.0] * len(times)
    found = partition(times, sizes, stages, sorted(allowed))

    def longest(cuts):
        return max(sum(times[a:b]) for a, b in itertools.pairwise((0, *cuts, len(times))))

    assert set(found) <= allowed
    assert longest(found) == min(longest(c) for c in itertools.combinations(sorted(allowed), stages - 1))


class Bridged(nn.Module):
    """Code between its modules uses h after the second one, so it can only be cut after that."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        h = self.a(x)
        return self.d(self.c(self.b(h) + h))


def start(make):
    fleet.init()
    model = make()
    model, _ = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(pipeline={"micro_batch": 2}))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    try:
        fleet.forward_backward(x, x, loss_fn=mse_loss)
    except StrategyError as problem:
        return str(problem)
    return next(line for line in str(fleet.explain()).splitlines() if "stages begin with" in line).split()[-1]


def test_it_does_not_cut_where_a_tensor_bypasses_the_module(ranks):
    for found in ranks.run(start, Bridged):
        assert found in ("c", "d")


def single():
    return nn.Linear(6, 6)


def test_a_model_of_one_module_cannot_be_cut(ranks):
    for problem in ranks.run(start, single):
        assert "can be cut into at most 1 stages, not 2" in problem


def test_the_longest_stage_is_as_short_as_possible(ranks):
    """The first block has 256 times the work of each of the others."""
    assert ranks.run(start, Uneven) == ["1", "1"]


class Wide(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.a, self.b = nn.Linear(6, 512 * n), nn.Linear(512 * n, 6)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class Uneven(nn.Sequential):
    def __init__(self):
        super().__init__(Wide(256), Wide(1), Wide(1), Wide(1))
