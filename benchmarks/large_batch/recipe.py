"""What all runs share, and the four optimizers. Based on the MLPerf recipe for ResNet-50 with LARS:

linear warm-up, then polynomial decay of power 2; label smoothing 0.1; biases and BatchNorm without decay or scaling.
Only the rate is tuned, with the same search for all four. Momentum, betas and decay are fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from fleetx import fleet

WORKERS = 2
MICRO = 128  # samples per worker and step, and so in BatchNorm's statistics, for every batch
SMALLEST = WORKERS * MICRO
SMOOTHING = 0.1
LONG_WARMUP_FROM = 16384  # MLPerf warms up for 9 % of the epochs below its batch of 32k, and for 28 % there
PLAIN = ["bn", ".bias"]  # parameters with one of these in their name get neither decay nor layer-wise scaling
STEP = 2.0  # between neighbouring rates


@dataclass(frozen=True)
class Recipe:
    title: str
    centre: float  # of the rates to try at the smallest batch
    power: float  # the centre is proportional to this power of the batch
    make: Callable[[nn.Module, float], Optimizer]
    switch: str = ""  # the strategy that turns the optimizer into LARS or LAMB
    configs: tuple[tuple[str, object], ...] = ()

    def rate(self, batch: int, step: int) -> float:
        """The rate `step` steps from the centre at this batch."""
        return float(f"{self.centre * (batch / SMALLEST) ** self.power * STEP**step:.2g}")

    def strategy(self, batch: int) -> fleet.DistributedStrategy:
        strategy = fleet.DistributedStrategy()
        strategy.gradient_merge = True
        strategy.gradient_merge_configs = {"k_steps": batch // (MICRO * fleet.worker_num())}
        if self.switch:
            setattr(strategy, self.switch, True)
            setattr(strategy, f"{self.switch}_configs", dict(self.configs) | {"exclude_from_weight_decay": PLAIN})
        return strategy


def groups(model: nn.Module, decay: float) -> list[dict[str, object]]:
    """Exclude parameters like strategy.lars and strategy.lamb, for optimizers that do not exclude by name."""
    split: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in model.named_parameters():
        split[any(pattern in name for pattern in PLAIN)].append(parameter)
    return [{"params": split[0], "weight_decay": decay}, {"params": split[1], "weight_decay": 0.0}]


def sgd(model: nn.Module, lr: float) -> Optimizer:
    return torch.optim.SGD(groups(model, 5e-4), lr, momentum=0.9, nesterov=True)


def adamw(model: nn.Module, lr: float) -> Optimizer:
    return torch.optim.AdamW(groups(model, 0.1), lr)


def momentum(model: nn.Module, lr: float) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9)


def adam(model: nn.Module, lr: float) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr)


# The centres and the coefficient of LARS come from a few runs before the study. With Paddle's coefficient of 0.001 the
# weights would need a rate fifty times as large, which biases and BatchNorm, whose steps are not scaled, would get too.
RECIPES = {
    "sgd": Recipe("Nesterov SGD", 0.8, 0.0, sgd),
    "adamw": Recipe("AdamW", 0.004, 0.4, adamw),
    "lars": Recipe("LARS", 0.4, 0.25, momentum, "lars", (("lars_coeff", 0.05), ("lars_weight_decay", 1e-4))),
    "lamb": Recipe("LAMB", 0.01, 0.5, adam, "lamb", (("lamb_weight_decay", 0.01),)),
}


def warmup(batch: int) -> float:
    """The fraction of all updates."""
    return 0.25 if batch >= LONG_WARMUP_FROM else 0.1
