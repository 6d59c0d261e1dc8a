from __future__ import annotations

import os
import signal

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fleetx import StrategyError, UsageError, fleet
from fleetx.measure import largest_batch
from small_models import Transformer, tokens


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


def test_steps_and_bends_are_followed():
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


def test_a_global_batch_that_cannot_be_shared_says_which_can():
    with pytest.raises(UsageError, match="a global batch of 10 cannot be shared by 4 ranks: 8 or 12 can"):
        largest_batch.solve(3, 10, 4)


def loss(out, y):
    return cross_entropy(out.flatten(0, 1), y.flatten())


def test_predicted_tried_and_larger_with_recompute():
    fleet.init()
    (ids,) = tokens(2, 16)
    found = {}
    for name, recompute in {
        "plain": None,
        "named": {"checkpoints": ["layers.*"]},
        "budget": {"memory_budget": "min"},
    }.items():
        strategy = fleet.DistributedStrategy(**({"recompute": recompute} if recompute else {}))
        model = Transformer()
        before = {k: v.clone() for k, v in model.state_dict().items()}
        found[name] = fleet.largest_batch(model, (ids, ids), memory="4MiB", strategy=strategy, loss_fn=loss)
        assert found[name].tried == pytest.approx(
            found[name].predicted, rel=0.05
        )  # small tensors count in a small model
        assert found[name].predicted <= 4 * 2**20
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        assert not any("forward" in vars(m) for m in model.modules())
    assert found["plain"].micro < found["named"].micro
    assert found["plain"].micro < found["budget"].micro
    assert "samples at a time" in str(found["plain"])


def test_merge_makes_up_for_a_small_batch():
    (ids,) = tokens(2, 16)
    found = fleet.largest_batch(
        Transformer(), (ids, ids), memory="3MiB", loss_fn=loss, global_batch=1024, ranks=2, trial=False
    )
    assert found.total == 1024 == found.micro * found.merge * 2
    assert found.tried is None


def test_not_even_one_sample():
    (ids,) = tokens(2, 16)
    with pytest.raises(StrategyError, match=r"one sample takes .* and 1.0 KiB are allowed"):
        fleet.largest_batch(Transformer(), (ids, ids), memory="1KiB", loss_fn=loss)


class Dies(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.parent = nn.Linear(4, 4), os.getpid()

    def forward(self, x):
        if os.getpid() != self.parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x)


def test_a_trial_that_dies_is_an_answer():
    with pytest.raises(StrategyError, match="died by SIGKILL"):
        fleet.largest_batch(Dies(), torch.randn(2, 4), memory="1MiB")


class Fails(Dies):
    def forward(self, x):
        if os.getpid() != self.parent:
            raise MemoryError("no more")
        return self.layer(x)


def test_a_trial_that_fails_says_why():
    with pytest.raises(StrategyError, match="failed: MemoryError: no more"):
        fleet.largest_batch(Fails(), torch.randn(2, 4), memory="1MiB")


@pytest.mark.parametrize("declared", [{"sharding": {"sharding_degree": 2}}, {"pipeline": {"micro_batch": 2}}])
def test_a_model_that_is_divided_is_not_counted(declared):
    strategy = fleet.DistributedStrategy(**declared)
    with pytest.raises(StrategyError, match=f"{next(iter(declared))} divides it"):
        fleet.largest_batch(torch.nn.Linear(4, 2), torch.randn(2, 4), memory="1GiB", strategy=strategy)
