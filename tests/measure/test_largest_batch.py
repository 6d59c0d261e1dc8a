from __future__ import annotations

import os
import re
import signal

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from fleetx import StrategyError, UsageError, fleet
from fleetx.measure import largest_batch
from training import assert_equal, weights


def steps_of(slope, fixed):
    asked = []

    def peak(n):
        asked.append(n)
        return fixed + slope * n

    return peak, asked


@pytest.mark.parametrize(("slope", "fixed", "memory", "expected"), [
    (10, 100, 1000, 90), (10, 100, 109, 0), (7, 0, 7, 1), (1, 0, 10**7, 1 << 20), (3, 50, 351, 100),
])  # fmt: skip
def test_the_largest_is_found_with_few_predictions(slope, fixed, memory, expected):
    peak, asked = steps_of(slope, fixed)
    assert largest_batch.largest(peak, memory) == expected
    assert len(asked) <= 8


def test_peaks_that_are_not_linear():
    for memory in range(60, 3000, 97):
        assert largest_batch.largest(lambda n: 50 + 10 * n + n * n // 50 + 30 * (n > 20), memory) == max(
            (n for n in range(1, 400) if 50 + 10 * n + n * n // 50 + 30 * (n > 20) <= memory), default=0
        )


@pytest.mark.parametrize(("micro", "total", "ranks", "expected"), [
    (10, None, 4, (10, 1)), (10, 64, 2, (8, 4)), (100, 64, 2, (32, 1)), (7, 13, 1, (1, 13)), (3, 12, 4, (3, 1)),
])  # fmt: skip
def test_the_global_batch_is_kept(micro, total, ranks, expected):
    found = largest_batch.solve(micro, total, ranks)
    assert found == expected
    assert total is None or found[0] * found[1] * ranks == total


def test_a_global_batch_that_the_ranks_do_not_divide():
    with pytest.raises(UsageError, match="global_batch = 10 is not divisible by 4 ranks: use 8 or 12"):
        largest_batch.solve(3, 10, 4)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)) for _ in range(4)))


def sample():
    return torch.randn(2, 32), torch.randn(2, 32)


@pytest.mark.slow
def test_predicted_tried_and_larger_with_recompute():
    fleet.init()
    micro = []
    for declared in ({}, {"recompute": {"checkpoints": ["*"]}}, {"recompute": {"memory_budget": "min"}}):
        model = mlp()
        before = weights(model)
        strategy = fleet.DistributedStrategy(**declared)
        found = fleet.largest_batch(model, sample(), memory="2MiB", strategy=strategy, loss_fn=mse_loss)
        assert found.tried == pytest.approx(found.predicted, rel=0.05)  # small tensors count in a small model
        assert found.predicted <= 2 * 2**20
        assert "samples at a time" in str(found)
        assert_equal(weights(model), before)
        assert not any("forward" in vars(m) for m in model.modules())
        micro.append(found.micro)
    assert micro[0] < min(micro[1:])


def test_merge_makes_up_for_a_small_batch():
    found = fleet.largest_batch(
        mlp(), sample(), memory="2MiB", loss_fn=mse_loss, global_batch=1024, ranks=2, trial=False
    )
    assert found.total == 1024 == found.micro * found.merge * 2
    assert found.tried is None


def test_not_even_one_sample():
    with pytest.raises(StrategyError, match=r"a single sample needs .*, but only 1.0 KiB is allowed"):
        fleet.largest_batch(mlp(), sample(), memory="1KiB", loss_fn=mse_loss)


class Dies(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.parent = nn.Linear(4, 4), os.getpid()

    def forward(self, x):
        if os.getpid() != self.parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x)


def test_a_trial_that_dies_is_an_error():
    with pytest.raises(StrategyError, match="failed: it was killed, probably for lack of memory"):
        fleet.largest_batch(Dies(), torch.randn(2, 4), memory="1MiB")


class Fails(Dies):
    def forward(self, x):
        if os.getpid() != self.parent:
            raise KeyError("no such layer")
        return self.layer(x)


def test_a_trial_that_fails_says_why():
    with pytest.raises(StrategyError, match="failed: KeyError: 'no such layer'"):
        fleet.largest_batch(Fails(), torch.randn(2, 4), memory="1MiB")


@pytest.mark.parametrize("declared", [{"sharding": {"sharding_degree": 2}}, {"pipeline": {"micro_batch": 2}}])
def test_a_model_that_is_divided_is_not_supported(declared):
    strategy = fleet.DistributedStrategy(**declared)
    with pytest.raises(StrategyError, match=f"{next(iter(declared))} divides it"):
        fleet.largest_batch(torch.nn.Linear(4, 2), torch.randn(2, 4), memory="1GiB", strategy=strategy)


class Normed(nn.Module):
    """Cannot take a single sample, and has an input without a batch dimension."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Linear(32, 32)

    def forward(self, x, scale):
        return self.b(self.norm(self.a(x))) * scale


def test_batch_norm_and_inputs_without_a_batch():
    found = fleet.largest_batch(Normed(), {"x": torch.randn(4, 32), "scale": torch.ones(32)}, memory="300KiB")
    assert found.micro > 1
    assert found.tried <= 300 * 1024


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory": "lots"}, "memory: 'lots' is not a number of bytes"),
        ({"memory": 0.5}, "memory: 0.5 is not a number of bytes"),
        ({"global_batch": 0}, "must be at least 1"),
        ({"ranks": -1}, "must be at least 1"),
        ({"loss_fn": mse_loss}, "sample must be a pair"),
        ({"sample": torch.randn(0, 4)}, "at least one sample"),
        ({"strategy": {"recompute": {"checkpoints": ["nope"]}}}, "no module 'nope'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_arguments_that_are_not_supported(arguments, message):
    arguments = {"sample": torch.randn(4, 4), "memory": "1MiB"} | arguments
    strategy = fleet.DistributedStrategy(**arguments.pop("strategy", {}))
    with pytest.raises((UsageError, StrategyError), match=re.escape(message)):
        fleet.largest_batch(nn.Linear(4, 4), strategy=strategy, trial=False, **arguments)
