"""A prediction runs a copy of the optimizer, and never the optimizer itself."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.nn.functional import mse_loss
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from fleetx import fleet
from fleetx.measure.fake_step import TrainingStep, estimate
from fleetx.parts.recompute import budget
from training import adam, assert_equal, batches, net, sgd, weights, zero_last

SCHEDULERS = {
    "lambda": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: CosineAnnealingLR(o, 10),
    "one_cycle": lambda o: OneCycleLR(o, 0.1, total_steps=20),
}


def trained(declared, scheduler):
    fleet.init()
    model = net()
    optimizer = adam(model)
    schedule = SCHEDULERS[scheduler](optimizer)
    model, optimizer = fleet.distribute(model, optimizer, fleet.DistributedStrategy(**declared))
    updates = []
    for x, y in batches(9):
        zero_last(model, optimizer, x, y)
        schedule.step()
        updates.append(fleet.updated)
    assert not [s for state in optimizer.state.values() for s in state.values() if isinstance(s, FakeTensor)]
    return updates, weights(model)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_budget_beside_a_scheduler_does_not_step_the_optimizer(scheduler):
    merge = {"gradient_merge": {"k_steps": 4}}
    updates, found = trained(merge | {"recompute": {"memory_budget": "min"}}, scheduler)
    plain, wanted = trained(merge, scheduler)
    assert updates == plain == [False, False, False, True] * 2 + [False]
    assert_equal(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_the_largest_batch_beside_a_scheduler_is_the_one_without(scheduler):
    """And neither the optimizer nor the model changes, nor the rate."""
    fleet.init()
    answers = []
    for makes in (None, SCHEDULERS[scheduler]):
        model = net()
        optimizer = adam(model)
        if makes is not None:
            makes(optimizer)
        before, rate = weights(model), optimizer.param_groups[0]["lr"]
        found = fleet.largest_batch(model, batches(1)[0], memory="64KiB", optimizer=optimizer, loss_fn=mse_loss)
        answers.append((found.micro, found.predicted, found.tried))
        assert_equal(weights(model), before)
        assert not optimizer.state
        assert optimizer.param_groups[0]["lr"] == rate
    assert answers[0] == answers[1]


class Averaging(Optimizer):
    """Steps through another optimizer, as SAM and Lookahead do."""

    def __init__(self, params, **options):
        super().__init__(params, {})
        self.inner = SGD(self.param_groups, **options)
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        return self.inner.step()


def averaging(model):
    return Averaging(model.parameters(), lr=0.1, momentum=0.9)


def patched(model):
    """Its step() is replaced on the object, as profilers and trainers do."""
    optimizer = sgd(model)
    step = optimizer.step
    optimizer.step = lambda closure=None: step()
    return optimizer


@pytest.mark.parametrize("make", [averaging, patched])
def test_the_prediction_changes_neither_an_inner_optimizer_nor_a_patched_one(make):
    model = nn.Linear(64, 64)
    optimizer = make(model)
    model(torch.randn(2, 64)).sum().backward()
    before = weights(model)
    found = estimate(TrainingStep(model, optimizer, (torch.randn(2, 64),)))
    assert_equal(before, weights(model))
    assert not optimizer.state
    assert not getattr(optimizer, "inner", optimizer).state
    assert found.optimizer == sum(p.nbytes for p in model.parameters())


class Unpredictable(SGD):
    def step(self, closure=None):
        raise RuntimeError("reads values")


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("kind", [adam, sgd, lambda model: Unpredictable(model.parameters(), lr=0.1)])
def test_segments_are_predicted_the_same_with_and_without_predicting_the_update_again(kind, kept):
    model = net()
    step = TrainingStep(model, kind(model), (torch.randn(64, 6),), kept_gradients=kept)
    install = partial(budget._install_named, ["0", "2"])
    plain = estimate(step)
    assert estimate(step, install, plain=plain) == estimate(step, install) != plain
