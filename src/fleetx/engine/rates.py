"""Learning rates that differ in one update from what the optimizer and its schedulers say."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class Rates:
    """Scales the rates of all groups, and restores them bit for bit, because schedulers compute with them."""

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._before: list[tuple[dict[str, Any], float | Tensor]] = []
        self.factor = 1.0  # of every update

    def scale(self, factor: float) -> None:
        """Until `restore`, which the engine calls after the update."""
        for group in self._optimizer.param_groups:
            rate = group["lr"]
            if isinstance(rate, Tensor):
                self._before.append((group, rate.clone()))
                rate.mul_(factor)  # in place, because a captured or compiled step reads this tensor
            else:
                self._before.append((group, rate))
                group["lr"] = rate * factor

    def restore(self) -> None:
        while self._before:
            group, rate = self._before.pop()
            if isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
