"""Learning rates over time, as Paddle has them.

A `LRScheduler` (paddle.optimizer.lr) moves when the script calls its step(). A `ByRun` (fluid.layers) moves with each
run of the program. Both are asked for their rate before each run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from typing import Any

from fleetx.applications.not_covered import not_covered_by
from fleetx.errors import UsageError
from fleetx.optim.schedule import UnboundSchedule


@dataclass(frozen=True)
class ByRun:
    """A rate that depends on how often the program was run before."""

    law: Callable[[int], float]

    def __call__(self, runs: int) -> float:
        return self.law(runs)


class LRScheduler:
    """A rate that depends on how often step() was called; `formula` says how."""

    def __init__(self, learning_rate: float, last_epoch: int = -1, verbose: bool = False):
        self.base_lr = self.last_lr = _number("learning_rate", learning_rate)
        self.last_epoch, self._verbose = last_epoch, verbose
        self.step()

    def formula(self, t: int) -> float:
        raise NotImplementedError

    def get_lr(self) -> float:
        return self.formula(self.last_epoch)

    def __call__(self) -> float:
        return self.last_lr

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self.last_lr = float(self.get_lr())
        if self._verbose:
            print(f"Epoch {self.last_epoch}: {type(self).__name__} set learning rate to {self.last_lr}.")

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "last_lr": self.last_lr}

    def set_state_dict(self, state: dict[str, Any]) -> None:
        self.last_epoch, self.last_lr = state["last_epoch"], state["last_lr"]

    __getattr__ = not_covered_by(
        "paddle.optimizer.lr.LRScheduler",
        ("step", "get_lr", "state_dict", "set_state_dict", "base_lr", "last_lr", "last_epoch"),
    )


Rate = float | LRScheduler | ByRun | UnboundSchedule


def checked(learning_rate: Any) -> Rate:
    """What a script may give for a learning rate."""
    if isinstance(learning_rate, LRScheduler | ByRun | UnboundSchedule):
        return learning_rate
    return _number("learning_rate", learning_rate)


def moves_by_run(rate: Rate) -> bool:
    return isinstance(rate, ByRun | UnboundSchedule)


def at(rate: Rate, runs: int) -> float:
    """The rate of the run that has so many before it."""
    if isinstance(rate, LRScheduler):
        return rate()
    return float(rate(runs) if callable(rate) else rate)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise UsageError(f"{name} = {value!r}: must be a number of at least 0, or a schedule")
    return float(value)


def check_counts(**counts: Any) -> None:
    """A formula divides by them."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
            raise UsageError(f"{name} = {value!r}: must be a number above 0")


def check_rising(name: str, places: Sequence[int]) -> None:
    if any(before >= after for before, after in pairwise(places)):
        raise UsageError(f"{name} = {list(places)!r}: each must be more than the one before")


# --- formulas that both habits have -----------------------------------------------------------------
def piecewise(t: int, boundaries: Sequence[int], values: Sequence[float]) -> float:
    return values[sum(t >= boundary for boundary in boundaries)]


def check_pieces(boundaries: Sequence[int], values: Sequence[float]) -> None:
    if len(values) != len(boundaries) + 1:
        raise UsageError(f"{len(boundaries)} boundaries divide {len(boundaries) + 1} values, not {len(values)}")
    check_rising("boundaries", boundaries)


def noam(t: int, peak: float, d_model: float, warmup_steps: float) -> float:
    rising, falling = warmup_steps**-1.5 * t, float(t) ** -0.5 if t else 1.0
    return peak * d_model**-0.5 * min(rising, falling)


def polynomial(t: int, start: float, decay_steps: int, end: float, power: float, cycle: bool) -> float:
    whole = decay_steps * max(1, math.ceil(t / decay_steps)) if cycle else decay_steps
    return (start - end) * (1 - min(t, whole) / whole) ** power + end


def warmup(t: int, warmup_steps: int, start: float, end: float) -> float:
    return start + (end - start) * t / warmup_steps
