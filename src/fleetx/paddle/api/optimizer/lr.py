"""paddle.optimizer.lr: schedules that change when the script calls their step()."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fleetx.paddle.static import rates
from fleetx.paddle.static.rates import LRScheduler

__all__ = [
    "CosineAnnealingDecay",
    "ExponentialDecay",
    "InverseTimeDecay",
    "LRScheduler",
    "LambdaDecay",
    "LinearWarmup",
    "MultiStepDecay",
    "NaturalExpDecay",
    "NoamDecay",
    "PiecewiseDecay",
    "PolynomialDecay",
    "StepDecay",
]


class NoamDecay(LRScheduler):
    def __init__(
        self, d_model: int, warmup_steps: int, learning_rate: float = 1.0, last_epoch: int = -1, verbose: bool = False
    ):
        rates.check_positive(d_model=d_model, warmup_steps=warmup_steps)
        self.d_model, self.warmup_steps = d_model, warmup_steps
        super().__init__(learning_rate, last_epoch, verbose)

    def formula(self, t: int) -> float:
        return rates.noam(t, self.base_lr, self.d_model, self.warmup_steps)


class PiecewiseDecay(LRScheduler):
    def __init__(self, boundaries: Sequence[int], values: Sequence[float], last_epoch: int = -1, verbose: bool = False):
        rates.check_pieces(boundaries, values)
        self.boundaries, self.values = list(boundaries), list(values)
        super().__init__(values[0], last_epoch, verbose)

    def formula(self, t: int) -> float:
        return rates.piecewise(t, self.boundaries, self.values)


class _Gamma(LRScheduler):
    def __init__(self, learning_rate: float, gamma: float, last_epoch: int = -1, verbose: bool = False):
        self.gamma = gamma
        super().__init__(learning_rate, last_epoch, verbose)


class NaturalExpDecay(_Gamma):
    def formula(self, t: int) -> float:
        return self.base_lr * math.exp(-self.gamma * t)


class InverseTimeDecay(_Gamma):
    def formula(self, t: int) -> float:
        return self.base_lr / (1 + self.gamma * t)


class ExponentialDecay(_Gamma):
    def formula(self, t: int) -> float:
        return self.base_lr * self.gamma**t


class PolynomialDecay(LRScheduler):
    def __init__(
        self,
        learning_rate: float,
        decay_steps: int,
        end_lr: float = 0.0001,
        power: float = 1.0,
        cycle: bool = False,
        last_epoch: int = -1,
        verbose: bool = False,
    ):
        rates.check_positive(decay_steps=decay_steps)
        self.decay_steps, self.end_lr, self.power, self.cycle = decay_steps, end_lr, power, cycle
        super().__init__(learning_rate, last_epoch, verbose)

    def formula(self, t: int) -> float:
        return rates.polynomial(t, self.base_lr, self.decay_steps, self.end_lr, self.power, self.cycle)


class LinearWarmup(LRScheduler):
    """Warm up, then use `learning_rate`: a number, or a schedule that starts after the warm-up."""

    def __init__(
        self,
        learning_rate: float | LRScheduler,
        warmup_steps: int,
        start_lr: float,
        end_lr: float,
        last_epoch: int = -1,
        verbose: bool = False,
    ):
        self.after, self.warmup_steps, self.start_lr, self.end_lr = learning_rate, warmup_steps, start_lr, end_lr
        super().__init__(end_lr, last_epoch, verbose)

    def formula(self, t: int) -> float:
        if t < self.warmup_steps:
            return rates.warmup(t, self.warmup_steps, self.start_lr, self.end_lr)
        if isinstance(self.after, LRScheduler):
            self.after.step(t - self.warmup_steps)
            return self.after()
        return self.after


class MultiStepDecay(LRScheduler):
    def __init__(
        self,
        learning_rate: float,
        milestones: Sequence[int],
        gamma: float = 0.1,
        last_epoch: int = -1,
        verbose: bool = False,
    ):
        rates.check_rising("milestones", milestones)
        self.milestones, self.gamma = list(milestones), gamma
        super().__init__(learning_rate, last_epoch, verbose)

    def formula(self, t: int) -> float:
        return self.base_lr * self.gamma ** sum(t >= milestone for milestone in self.milestones)


class StepDecay(LRScheduler):
    def __init__(
        self, learning_rate: float, step_size: int, gamma: float = 0.1, last_epoch: int = -1, verbose: bool = False
    ):
        rates.check_positive(step_size=step_size)
        self.step_size, self.gamma = step_size, gamma
        super().__init__(learning_rate, last_epoch, verbose)

    def formula(self, t: int) -> float:
        return self.base_lr * self.gamma ** (t // self.step_size)


class LambdaDecay(LRScheduler):
    def __init__(
        self, learning_rate: float, lr_lambda: Callable[[int], float], last_epoch: int = -1, verbose: bool = False
    ):
        self.lr_lambda = lr_lambda
        super().__init__(learning_rate, last_epoch, verbose)

    def formula(self, t: int) -> float:
        return self.base_lr * self.lr_lambda(t)


class CosineAnnealingDecay(LRScheduler):
    def __init__(
        self,
        learning_rate: float,
        T_max: int,  # noqa: N803
        eta_min: float = 0.0,
        last_epoch: int = -1,
        verbose: bool = False,
    ):
        rates.check_positive(T_max=T_max)
        self.T_max, self.eta_min = T_max, eta_min
        super().__init__(learning_rate, last_epoch, verbose)

    def formula(self, t: int) -> float:
        return self.eta_min + (self.base_lr - self.eta_min) * (1 + math.cos(math.pi * t / self.T_max)) / 2
