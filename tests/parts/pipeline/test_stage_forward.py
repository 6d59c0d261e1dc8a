"""One stage of a forward, without other ranks: what a module must not do."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from fleetx import UsageError
from fleetx.comm.roles import ProcessInfo
from fleetx.comm.world import World
from fleetx.parts.pipeline.stage_params import StageParams
from fleetx.parts.pipeline.stages import StageForward
from fleetx.parts.pipeline.trace import map_stages, trace

CPU = torch.device("cpu")


class Stages:
    """A model that is cut before `b`."""

    def __init__(self, model):
        x = torch.randn(4, 6)
        self.model, self.x = model, x
        stage_map = map_stages(model, ["b"], lambda: model(x))
        self.params = StageParams(model, stage_map, lambda stage: stage, World(ProcessInfo(), CPU))
        self.trace = trace(stage_map, CPU, self.forward)

    def forward(self, interceptor):
        self.params.interceptor = interceptor
        try:
            return self.model(self.x)
        finally:
            self.params.interceptor = None

    def run(self, stage, *inputs):
        return StageForward(self.params, self.trace, stage, inputs).run(self.forward, seed=0)


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.temperature = nn.Linear(6, 6), 1.0

    def forward(self, x):
        return self.inner(x), self.temperature


class Annealed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.repeats = Tempered(), nn.Linear(6, 3), 1

    def forward(self, x):
        for _ in range(self.repeats):
            h, temperature = self.a(x)
        return self.b(h / temperature)


def test_stages_hand_on_what_the_next_one_needs():
    stages = Stages(Annealed())
    (sent,) = stages.run(0)
    assert torch.equal(stages.run(1, sent), stages.model(stages.x))


def test_a_constant_that_changes_is_an_error():
    stages = Stages(Annealed())
    stages.model.a.temperature = 0.5
    with pytest.raises(UsageError, match=r"'a' returned \[0.5\] next to its tensors, but \[1.0\] before"):
        stages.run(0)


def test_more_calls_than_before_are_an_error():
    stages = Stages(Annealed())
    stages.model.repeats = 2
    with pytest.raises(UsageError, match="calls 'a' more often than before"):
        stages.run(0)


class TwoHeads(nn.Module):
    """One of them is in the first stage."""

    def __init__(self):
        super().__init__()
        self.a, self.early, self.b = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        h = self.a(x)
        early = self.early(h)
        return self.b(h), early


def test_a_loss_that_reads_an_output_of_an_earlier_stage_is_an_error():
    stages = Stages(TwoHeads())
    (sent,) = stages.run(0)

    def loss(interceptor):
        late, early = stages.forward(interceptor)
        return late.sum() + early.sum()

    # torch warns about mixing tensors with and without data.
    with (
        warnings.catch_warnings(action="ignore"),
        pytest.raises(UsageError, match="the loss reads an output of an earlier stage"),
    ):
        StageForward(stages.params, stages.trace, 1, [sent]).run(loss, seed=0)
