"""What is not supported raises an error that names the nearest settings that are."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from fleetx import StrategyError, UsageError, fleet
from training import net, sgd


def config(starts, number, mode="1F1B", **more):
    return {"stages": starts, "accumulate_steps": number, "schedule_mode": mode} | more


def message(declared, make=net, call=None):
    """The error of one step with a batch of 16."""
    fleet.init()
    model = make()
    x, y = torch.randn(16, 6), torch.randn(16, 3)
    try:
        model, o = fleet.distribute(model, sgd(model), fleet.DistributedStrategy(**declared))
        call(model, o, x, y) if call else fleet.forward_backward(x, y, loss_fn=mse_loss)
    except (StrategyError, UsageError) as problem:
        return str(problem)
    return "no error"


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        h = self.a(x)
        return self.c(self.b(h) + h)


class Placed(nn.Sequential):
    """On these stages; None: not placed."""

    stages: tuple[int | None, ...] = (0, 1)

    def __init__(self):
        layers = []
        for stage in self.stages:
            if stage is None:
                layers.append(nn.Linear(6, 6))
            else:
                with fleet.device_guard(f"stage:{stage}"):
                    layers.append(nn.Linear(6, 6))
        super().__init__(*layers)


class Gap(Placed):
    stages = (0, 2)


class Forgotten(Placed):
    stages = (0, None, 1)


class Backwards(Placed):
    stages = (1, 0)


@pytest.mark.parametrize(
    ("declared", "make", "text"),
    [
        (config(["3"], 3), net, "a batch of 16 cannot be split into 3 micro-batches: set micro_batch to 2 or 4, or "
                                "pass batches of 15 or 18 for 3 micro-batches"),
        (config(["3"], 1), net, "needs at least 2: set micro_batch to 2 or 4"),
        (config(["3"], 4, micro_batch_size=8), net, "a batch of 16 cannot be split into 4 micro-batches of 8: pass "
                                                    "batches of 32"),
        (config(["1", "2", "3"], 3, "Interleaved1F1B"), net, "set micro_batch to 2 or 4, or pass batches of 20 for 4"),
        (config(["1", "2", "3"], 4), net, "4 stages need 4 ranks, but this run has 2: start 4 workers, or make 2 "
                                          "stages"),
        (config(["3"], 4, degree=3), net, "need 3 ranks, but this run has 2"),
        (config(["bb"], 4), Skipping, "the model has no module 'bb': did you mean 'b'?"),
        (config(["3", "3"], 4), net, "names '3' twice"),
        (config(["3"], 4, "1F2B"), net, "did you mean '1F1B'?"),
        (config(["3"], 4) | {"micro_batch": 2}, net, "micro_batch = 2 and accumulate_steps = 4 both set"),
        (config(["1", "2", "3"], 4, degree=2), net, "1F1B needs one stage per rank, but there are 4 on 2 ranks"),
        (config(["c"], 4), Skipping, "no error"),
        (config(["b"], 4), Skipping, "uses a tensor of an earlier stage that is not an argument of this module"),
        ({"micro_batch": 4}, Gap, "device_guard placed layers on stages 0, 2, but none on 1"),
        ({"micro_batch": 4}, Forgotten, "not placed on any stage: 1"),
        ({"micro_batch": 4}, Backwards, "place layers in the order in which they are called"),
        (config(["1"], 4), Placed, "'stages'] and device_guard both set"),
    ],
)  # fmt: skip
def test_the_error_says_what_is_possible(ranks, declared, make, text):
    for found in ranks.run(message, {"pipeline": declared}, make):
        assert text in found


def test_ranks_that_do_not_divide(four):
    for found in four.run(message, {"pipeline": config(["2", "4"], 4)}):
        assert "4 ranks cannot be divided into pipelines of 3: use pipelines of 2 or 4, or start 3 or 6" in found


def call_model(model, optimizer, x, y):
    model(x)


def clip_by_hand(model, optimizer, x, y):
    fleet.forward_backward(x, y, loss_fn=mse_loss)
    nn.utils.clip_grad_norm_([p for p in model.parameters() if not p.is_meta], 0.01)
    optimizer.step()


def different_batches(model, optimizer, x, y):
    fleet.forward_backward(x + fleet.worker_index(), y, loss_fn=mse_loss)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (call_model, "fleet.forward_backward(x, y, loss_fn=...)"),
        (clip_by_hand, "strategy.clip = True"),
        (different_batches, "ranks 0 to 1 form one pipeline, but got different batches"),
    ],
)
def test_what_a_training_loop_cannot_do(ranks, call, text):
    for found in ranks.run(message, {"pipeline": config(["2"], 4)}, net, call):
        assert text in found


@pytest.mark.parametrize("other", [{"sharding": {"sharding_degree": 2}}, {"recompute": {"memory_budget": "min"}}])
def test_strategies_that_exclude_each_other(ranks, other):
    (name,) = other
    for found in ranks.run(message, {"pipeline": config(["2"], 4)} | other):
        assert name in found.lower()
        assert "pipeline" in found.lower()
