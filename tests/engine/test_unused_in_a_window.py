"""A parameter that only one rank has used, and only in an earlier step of a merge window, is updated on all ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fleetx import fleet
from training import sgd, weights

STRATEGY = {"gradient_merge": {"k_steps": 2}, "find_unused_parameters": True}
WAYS = [("left", "right"), ("right", "right"), ("right", "left"), ("right", "right")]  # of each rank, in each step


class Fork(nn.Module):
    """Uses one of two layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)

    def forward(self, x, way):
        return getattr(self, way)(x) * self.scale


def distributed():
    model = Fork()
    return fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**STRATEGY))


def inputs(step, rank):
    return torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3).sin()[rank::2] * (step + 1)


def job(how):
    fleet.init()
    model, optimizer = distributed()
    rank = fleet.worker_index()
    for step, ways in enumerate(WAYS):
        if how == "resumed" and step % 2:
            saved = [t.state_dict() for t in (model, optimizer)]
            model, optimizer = distributed()
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        if how == "unfrozen" and step == 1:
            model.scale.requires_grad_(True)  # makes new buckets
        model(inputs(step, rank), ways[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def by_hand(how):
    model = Fork()
    optimizer = sgd(model)
    for step, ways in enumerate(WAYS):
        model.scale.requires_grad_(how == "unfrozen" and step >= 1)
        for rank, way in enumerate(ways):
            (model(inputs(step, rank), way).square().mean() / 4).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("how", ["unbroken", "resumed", "unfrozen"])
def test_what_one_rank_used_earlier_is_updated_on_all(ranks, how):
    for found in ranks.run(job, how):
        torch.testing.assert_close(found, by_hand(how), rtol=1e-12, atol=1e-14)


def flushed():
    """A window that was flushed has used a layer that the next one does not use."""
    fleet.init()
    model, optimizer = distributed()
    rank = fleet.worker_index()
    for step, way in enumerate(["left", "right", "right"]):
        model(inputs(step, rank), way).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            fleet.flush()
            before = model.left.weight.detach().clone()
    return torch.equal(model.left.weight, before)


def test_a_flush_ends_what_was_used(ranks):
    assert ranks.run(flushed) == [True, True]
