"""Complex parameters train like real ones: each number is sent, averaged and rounded with both of its halves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fleetx import fleet
from training import assert_equal, weights

STEPS = 5


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 5, dtype=torch.complex128)
        self.second = nn.Linear(5, 3, dtype=torch.complex128)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        return self.second(self.first(x.to(torch.complex128))).abs() * self.scale


def data():
    g = torch.Generator().manual_seed(1)
    return [torch.randn(4, 6, generator=g, dtype=torch.float64) for _ in range(STEPS)]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def trained(declared):
    fleet.init()
    model = Complex()
    model, optimizer = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
    for x in data():
        model(x.chunk(2)[fleet.worker_index()]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    fleet.flush()
    return weights(model)


def merged(k):
    """One process, windows of k batches, the last one shorter."""
    model = Complex()
    optimizer = sgd(model)
    for start in range(0, STEPS, k):
        model(torch.cat(data()[start : start + k])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


FP16 = {"fp16_allreduce": {"dtype": "float16"}}
CASES = [  # the strategy, the steps per update, and the difference that its rounding allows
    ({}, 1, 1e-12),
    ({"gradient_merge": {"k_steps": 2}}, 2, 1e-12),
    ({"gradient_merge": {"k_steps": 2}, "clip": {"clip_norm": 1e6}}, 2, 1e-12),
    (FP16, 1, 1e-2),
    ({"dgc": True}, 1, 1e-12),
    (FP16 | {"gradient_merge": {"k_steps": 2}}, 2, 1e-2),
    (
        {
            "use_hierarchical_allreduce": True,
            "hierarchical_allreduce_inter_nranks": 2,
            "gradient_merge": {"k_steps": 2},
        },
        2,
        1e-12,
    ),
]


@pytest.mark.parametrize(
    ("declared", "k", "difference"), CASES, ids=lambda v: "+".join(v) if isinstance(v, dict) else None
)
def test_two_ranks_equal_one_process(ranks, declared, k, difference):
    found = ranks.run(trained, declared)
    assert_equal(found[0], found[1])
    torch.testing.assert_close(found[0], merged(k), rtol=difference, atol=difference)


def averaged(declared):
    """LocalSGD by hand, in this process: what each rank would do alone, and the mean."""
    models = [Complex(), Complex()]
    optimizers = [sgd(m) for m in models]
    for number, x in enumerate(data(), 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            model(x.chunk(2)[rank]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if number % 2:  # the first, and every second one after it
            with torch.no_grad():
                for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
                    mean = (a + b) / 2
                    a.copy_(mean)
                    b.copy_(mean)
                    if declared.get("average_momentum"):
                        (one, two) = (o.state[p]["momentum_buffer"] for o, p in zip(optimizers, (a, b), strict=True))
                        half = (one + two) / 2
                        one.copy_(half)
                        two.copy_(half)
    return weights(models[0])


@pytest.mark.parametrize("more", [{}, {"average_momentum": True}], ids=lambda v: "+".join(v) or "plain")
def test_localsgd_averages_both_halves(ranks, more):
    found = ranks.run(trained, {"localsgd": {"k_steps": 2} | more})
    assert_equal(found[0], found[1])
    torch.testing.assert_close(found[0], averaged(more), rtol=1e-12, atol=1e-12)
