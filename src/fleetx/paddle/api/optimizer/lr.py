"""paddle.optimizer.lr: schedules that change when the script calls their step()."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

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


class _FormulaLR(LRScheduler):
    """A rate given by a formula of the step. Takes the formula's arguments, then last_epoch and verbose."""

    formula: ClassVar[Callable[..., float]]

    def __init_subclass__(cls) -> None:
        _, *own = inspect.signature(cls.formula).parameters.values()
        _, *common = inspect.signature(LRScheduler).parameters.values()
        cls.__signature__ = inspect.Signature([*own, *common])  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **kwargs: Any):
        given = rates.arguments_of(type(self), args, kwargs)
        common = [given.pop(name) for name in ("learning_rate", "last_epoch", "verbose")]
        self._names = list(given)
        vars(self).update(given)
        super().__init__(*common)

    def get_lr(self) -> float:
        given = {name: getattr(self, name) for name in self._names}
        return self.formula(self.last_epoch, learning_rate=self.base_lr, **given)


class NoamDecay(_FormulaLR):
    formula = staticmethod(rates.noam)


class NaturalExpDecay(_FormulaLR):
    @staticmethod
    def formula(t: int, learning_rate: float, gamma: float) -> float:
        return learning_rate * math.exp(-gamma * t)


class InverseTimeDecay(_FormulaLR):
    @staticmethod
    def formula(t: int, learning_rate: float, gamma: float) -> float:
        return learning_rate / (1 + gamma * t)


class ExponentialDecay(_FormulaLR):
    @staticmethod
    def formula(t: int, learning_rate: float, gamma: float) -> float:
        return learning_rate * gamma**t


class PolynomialDecay(_FormulaLR):
    formula = staticmethod(rates.polynomial)


class MultiStepDecay(_FormulaLR):
    @staticmethod
    def formula(t: int, learning_rate: float, milestones: Sequence[int], gamma: float = 0.1) -> float:
        rates.check_rising("milestones", milestones)
        return learning_rate * gamma ** sum(t >= milestone for milestone in milestones)


class StepDecay(_FormulaLR):
    @staticmethod
    def formula(t: int, learning_rate: float, step_size: int, gamma: float = 0.1) -> float:
        rates.check_positive(step_size=step_size)
        return learning_rate * gamma ** (t // step_size)


class LambdaDecay(_FormulaLR):
    @staticmethod
    def formula(t: int, learning_rate: float, lr_lambda: Callable[[int], float]) -> float:
        return learning_rate * lr_lambda(t)


class CosineAnnealingDecay(_FormulaLR):
    @staticmethod
    def formula(t: int, learning_rate: float, T_max: int, eta_min: float = 0.0) -> float:  # noqa: N803
        rates.check_positive(T_max=T_max)
        return eta_min + (learning_rate - eta_min) * (1 + math.cos(math.pi * t / T_max)) / 2


class PiecewiseDecay(LRScheduler):
    def __init__(self, boundaries: Sequence[int], values: Sequence[float], last_epoch: int = -1, verbose: bool = False):
        rates.piecewise(0, boundaries, values)  # checks them
        self.boundaries, self.values = list(boundaries), list(values)
        super().__init__(values[0], last_epoch, verbose)

    def get_lr(self) -> float:
        return rates.piecewise(self.last_epoch, self.boundaries, self.values)


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

    def get_lr(self) -> float:
        t = self.last_epoch
        if t < self.warmup_steps:
            return rates.warmup(t, self.warmup_steps, self.start_lr, self.end_lr)
        if isinstance(self.after, LRScheduler):
            self.after.step(t - self.warmup_steps)
            return self.after()
        return self.after
