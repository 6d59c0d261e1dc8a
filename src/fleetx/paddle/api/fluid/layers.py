"""paddle.fluid.layers: only learning rate schedules are supported. They change with each run of the program."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fleetx.paddle.static import rates
from fleetx.paddle.static.rates import ByRun

__all__ = [
    "cosine_decay",
    "exponential_decay",
    "inverse_time_decay",
    "linear_lr_warmup",
    "natural_exp_decay",
    "noam_decay",
    "piecewise_decay",
    "polynomial_decay",
]


def noam_decay(d_model: int, warmup_steps: int, learning_rate: float = 1.0) -> ByRun:
    rates.check_positive(d_model=d_model, warmup_steps=warmup_steps)
    return ByRun(lambda t: rates.noam(t + 1, learning_rate, d_model, warmup_steps))  # Paddle counts from 1 here


def exponential_decay(learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False) -> ByRun:
    rates.check_positive(decay_steps=decay_steps)
    return ByRun(lambda t: learning_rate * decay_rate ** _epochs(t, decay_steps, staircase))


def natural_exp_decay(learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False) -> ByRun:
    rates.check_positive(decay_steps=decay_steps)
    return ByRun(lambda t: learning_rate * math.exp(-decay_rate * _epochs(t, decay_steps, staircase)))


def inverse_time_decay(learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False) -> ByRun:
    rates.check_positive(decay_steps=decay_steps)
    return ByRun(lambda t: learning_rate / (1 + decay_rate * _epochs(t, decay_steps, staircase)))


def polynomial_decay(
    learning_rate: float,
    decay_steps: int,
    end_learning_rate: float = 0.0001,
    power: float = 1.0,
    cycle: bool = False,
) -> ByRun:
    rates.check_positive(decay_steps=decay_steps)
    return ByRun(lambda t: rates.polynomial(t, learning_rate, decay_steps, end_learning_rate, power, cycle))


def piecewise_decay(boundaries: Sequence[int], values: Sequence[float]) -> ByRun:
    rates.check_pieces(boundaries, values)
    return ByRun(lambda t: rates.piecewise(t, boundaries, values))


def cosine_decay(learning_rate: float, step_each_epoch: int, epochs: int) -> ByRun:
    rates.check_positive(step_each_epoch=step_each_epoch, epochs=epochs)
    return ByRun(lambda t: learning_rate * (math.cos(t // step_each_epoch * math.pi / epochs) + 1) / 2)


def linear_lr_warmup(learning_rate: float | ByRun, warmup_steps: int, start_lr: float, end_lr: float) -> ByRun:
    """A schedule that follows the warm-up also counts the runs of the warm-up."""
    after = rates.checked(learning_rate)
    return ByRun(lambda t: rates.warmup(t, warmup_steps, start_lr, end_lr) if t < warmup_steps else rates.at(after, t))


def _epochs(t: int, decay_steps: int, staircase: bool) -> float:
    return t // decay_steps if staircase else t / decay_steps
