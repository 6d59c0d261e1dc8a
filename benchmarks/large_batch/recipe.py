"""What all runs share, and the five optimizers. Based on the MLPerf recipe for ResNet-50 with LARS:

linear warm-up, then polynomial decay of power 2; label smoothing for images; biases and norms without decay or scaling.
Rate, decay and, in large batches, the warm-up are tuned with the same search for all five. Momentum, betas: fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.large_batch.tasks import Task
from fleetx import fleet

# MLPerf warms up for 9 % of the epochs below its batch of 32k, for 28 % there.
SHORT_WARMUP, LONG_WARMUP = 0.1, 0.25  # of all updates
LONG_WARMUP_FROM = 0.025  # of the data
PLAIN = ["bn", "norm", ".bias"]  # parameters with one of these in their name get neither decay nor scaling
STEP = 2.0  # between neighbouring rates
DECAY_STEP = 4.0  # between neighbouring decays


@dataclass(frozen=True)
class Recipe:
    title: str
    centre: Mapping[str, float]  # of the rates to try at the smallest share, by task
    power: float  # the centre is proportional to this power of the batch
    decay: Mapping[str, float]  # the first decay to try, by task
    make: Callable[[nn.Module, float, float], Optimizer]  # from rate and decay
    switch: str = ""  # the strategy that turns the optimizer into another one
    configs: Callable[[nn.Module, float], dict[str, Any]] = lambda model, decay: {}

    def rate(self, task: Task, share: float, step: int) -> float:
        """The rate `step` steps from the centre at this batch."""
        grown = (task.batch(share) / task.batch(0.005)) ** self.power
        return float(f"{self.centre[task.name] * grown * STEP**step:.2g}")

    def decay_at(self, task: Task, step: int) -> float:
        return float(f"{self.decay[task.name] * DECAY_STEP**step:.2g}")

    def strategy(self, task: Task, share: float, model: nn.Module, decay: float) -> fleet.DistributedStrategy:
        strategy = fleet.DistributedStrategy()
        strategy.gradient_merge = {"k_steps": task.merged(share)}
        if self.switch:
            setattr(strategy, self.switch, self.configs(model, decay) or True)
        return strategy


def plain(model: nn.Module) -> list[str]:
    """The patterns that match something: others would be errors."""
    names = [name for name, _ in model.named_parameters()]
    return [pattern for pattern in PLAIN if any(pattern in name for name in names)]


def groups(model: nn.Module, decay: float) -> list[dict[str, object]]:
    """Exclude parameters like strategy.lars and strategy.lamb, for optimizers that do not exclude by name."""
    split: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in model.named_parameters():
        split[any(pattern in name for pattern in PLAIN)].append(parameter)
    return [{"params": split[0], "weight_decay": decay}, {"params": split[1], "weight_decay": 0.0}]


def sgd(model: nn.Module, lr: float, decay: float) -> Optimizer:
    return torch.optim.SGD(groups(model, decay), lr, momentum=0.9, nesterov=True)


def adamw(model: nn.Module, lr: float, decay: float) -> Optimizer:
    return torch.optim.AdamW(groups(model, decay), lr)


def momentum(model: nn.Module, lr: float, decay: float) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9)


def adam(model: nn.Module, lr: float, decay: float) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr)


def lars(model: nn.Module, decay: float) -> dict[str, Any]:
    return {"lars_coeff": 0.05, "lars_weight_decay": decay, "exclude_from_weight_decay": plain(model)}


def lamb(model: nn.Module, decay: float) -> dict[str, Any]:
    return {"lamb_weight_decay": decay, "exclude_from_weight_decay": plain(model)}


# The centres for images, and the coefficient of LARS, come from the first version of this study; the others are usual
# values. AdamW's for images and Muon's were doubled after the first shares chose the largest rate tried. The search
# moves away from a centre whose neighbour is better. With Paddle's coefficient of 0.001 the weights would need a rate
# fifty times as large, which biases and norms, whose steps are not scaled, would get too.
RECIPES = {
    "sgd": Recipe("Nesterov SGD", {"images": 0.8, "text": 0.4}, 0.0, {"images": 2e-3, "text": 1e-4}, sgd),
    "adamw": Recipe("AdamW", {"images": 0.008, "text": 0.004}, 0.4, {"images": 0.1, "text": 0.1}, adamw),
    "lars": Recipe("LARS", {"images": 0.4, "text": 0.4}, 0.25, {"images": 1e-4, "text": 1e-4}, momentum, "lars", lars),
    "lamb": Recipe("LAMB", {"images": 0.01, "text": 0.01}, 0.5, {"images": 0.01, "text": 0.01}, adam, "lamb", lamb),
    "muon": Recipe("Muon", {"images": 0.02, "text": 0.02}, 0.25, {"images": 0.1, "text": 0.1}, adamw, "muon"),
}  # fmt: skip


def warmup(share: float) -> float:
    """The fraction of all updates."""
    return LONG_WARMUP if share >= LONG_WARMUP_FROM else SHORT_WARMUP
