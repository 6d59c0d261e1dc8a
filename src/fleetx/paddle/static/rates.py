"""Paddle's learning rates.

A `LRScheduler` (paddle.optimizer.lr) changes when the script calls its step(). A `ByRun` (fluid.layers) changes with
each run of the program. Both are evaluated before each run.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real
from typing import Any

from fleetx.applications.not_covered import not_covered_by
from fleetx.errors import UsageError
from fleetx.optim.schedule import UnboundSchedule


@dataclass(frozen=True)
class ByRun:
    """A rate that depends on the number of earlier runs of the program."""

    formula: Callable[[int], float]

    def __post_init__(self) -> None:
        self.formula(0)  # checks its arguments

    def __call__(self, runs: int) -> float:
        return self.formula(runs)


class LRScheduler:
    """A rate that depends on the number of calls of step(); subclasses define `get_lr`."""

    def __init__(self, learning_rate: float, last_epoch: int = -1, verbose: bool = False):
        self.base_lr = self.last_lr = _number("learning_rate", learning_rate)
        self.last_epoch, self._verbose = last_epoch, verbose
        self.step()

    def get_lr(self) -> float:
        raise NotImplementedError

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
    if isinstance(learning_rate, LRScheduler | ByRun | UnboundSchedule):
        return learning_rate
    return _number("learning_rate", learning_rate)


def changes_by_run(rate: Rate) -> bool:
    return isinstance(rate, ByRun | UnboundSchedule)


def at(rate: Rate, runs: int) -> float:
    """The rate after `runs` runs."""
    if isinstance(rate, LRScheduler):
        return rate()
    return float(rate(runs) if callable(rate) else rate)


def arguments_of(kind: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, including defaults, according to the class's __signature__."""
    try:
        bound = inspect.signature(kind).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{kind.__name__}: {error}") from None
    bound.apply_defaults()
    return dict(bound.arguments)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise UsageError(f"{name} = {value!r}: must be a number of at least 0, or a schedule")
    return float(value)


def check_positive(**values: Any) -> None:
    """Raise an error for values that a formula cannot divide by."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
            raise UsageError(f"{name} = {value!r}: must be a number above 0")


def check_rising(name: str, steps: Sequence[int]) -> None:
    if any(before >= after for before, after in pairwise(steps)):
        raise UsageError(f"{name} = {list(steps)!r}: each number must be larger than the one before")


# --- formulas of both APIs, with Paddle 2's names of their arguments --------------------------------
def piecewise(t: int, boundaries: Sequence[int], values: Sequence[float]) -> float:
    if len(values) != len(boundaries) + 1:
        raise UsageError(f"{len(boundaries)} boundaries need {len(boundaries) + 1} values, not {len(values)}")
    check_rising("boundaries", boundaries)
    return values[sum(t >= boundary for boundary in boundaries)]


def noam(t: int, d_model: int, warmup_steps: int, learning_rate: float = 1.0) -> float:
    check_positive(d_model=d_model, warmup_steps=warmup_steps)
    rising, falling = warmup_steps**-1.5 * t, float(t) ** -0.5 if t else 1.0
    return learning_rate * d_model**-0.5 * min(rising, falling)


def polynomial(
    t: int, learning_rate: float, decay_steps: int, end_lr: float = 0.0001, power: float = 1.0, cycle: bool = False
) -> float:
    check_positive(decay_steps=decay_steps)
    steps = decay_steps * max(1, math.ceil(t / decay_steps)) if cycle else decay_steps
    return (learning_rate - end_lr) * (1 - min(t, steps) / steps) ** power + end_lr


def warmup(t: int, warmup_steps: int, start: float, end: float) -> float:
    return start + (end - start) * t / warmup_steps


# --- fluid.layers: these change with each run of the program ---------------------------------------
def noam_decay(d_model: int, warmup_steps: int, learning_rate: float = 1.0) -> ByRun:
    return ByRun(lambda t: noam(t + 1, d_model, warmup_steps, learning_rate))  # Paddle counts from 1 here


def exponential_decay(learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False) -> ByRun:
    return ByRun(lambda t: learning_rate * decay_rate ** _epochs(t, decay_steps, staircase))


def natural_exp_decay(learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False) -> ByRun:
    return ByRun(lambda t: learning_rate * math.exp(-decay_rate * _epochs(t, decay_steps, staircase)))


def inverse_time_decay(learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False) -> ByRun:
    return ByRun(lambda t: learning_rate / (1 + decay_rate * _epochs(t, decay_steps, staircase)))


def polynomial_decay(
    learning_rate: float,
    decay_steps: int,
    end_learning_rate: float = 0.0001,
    power: float = 1.0,
    cycle: bool = False,
) -> ByRun:
    return ByRun(lambda t: polynomial(t, learning_rate, decay_steps, end_learning_rate, power, cycle))


def piecewise_decay(boundaries: Sequence[int], values: Sequence[float]) -> ByRun:
    return ByRun(lambda t: piecewise(t, boundaries, values))


def cosine_decay(learning_rate: float, step_each_epoch: int, epochs: int) -> ByRun:
    check_positive(step_each_epoch=step_each_epoch, epochs=epochs)
    return ByRun(lambda t: learning_rate * (math.cos(t // step_each_epoch * math.pi / epochs) + 1) / 2)


def linear_lr_warmup(learning_rate: float | ByRun, warmup_steps: int, start_lr: float, end_lr: float) -> ByRun:
    """A schedule that follows the warm-up also counts the runs of the warm-up."""
    after = checked(learning_rate)
    return ByRun(lambda t: warmup(t, warmup_steps, start_lr, end_lr) if t < warmup_steps else at(after, t))


def _epochs(t: int, decay_steps: int, staircase: bool) -> float:
    check_positive(decay_steps=decay_steps)
    return t // decay_steps if staircase else t / decay_steps
