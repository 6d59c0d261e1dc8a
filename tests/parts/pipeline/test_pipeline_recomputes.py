"""Recomputation under a pipeline is observed to act: equal numbers alone cannot show it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from fleetx import fleet
from training import sgd


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x):
        self.calls += x.device.type != "meta"
        return torch.tanh(self.inner(x))


def calls_per_step(others):
    """Forward calls of each block that this rank holds, in each step."""
    fleet.init()
    torch.manual_seed(0)
    model = nn.Sequential(*(Counted() for _ in range(6)))
    settings = {"pipeline": {"stages": ["3"], "accumulate_steps": 4}, "recompute": {"checkpoints": ["2", "5"]}}
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**settings, **others))
    mine = [model[i] for i in ((0, 1, 2) if fleet.worker_index() == 0 else (3, 4, 5))]
    counts = []
    for _ in range(4):
        before = [block.calls for block in mine]
        fleet.forward_backward(torch.ones(8, 8), torch.zeros(8, 8), loss_fn=mse_loss)
        optimizer.step()
        optimizer.zero_grad()
        counts.append([block.calls - b for block, b in zip(mine, before, strict=True)])
    return counts


@pytest.mark.parametrize("others", [{}, {"gradient_merge": {"k_steps": 2}}, {"amp": {"dtype": "bfloat16"}}], ids=str)
def test_every_block_runs_twice_per_micro_batch_in_every_step(ranks, others):
    for counts in ranks.run(calls_per_step, others):
        assert all(calls == [8, 8, 8] for calls in counts[1:]), counts  # 4 micro-batches, forward and recomputation
