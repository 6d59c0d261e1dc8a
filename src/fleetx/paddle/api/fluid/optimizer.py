"""paddle.fluid.optimizer: each under its long name and its short one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fleetx.applications import Parameter
from fleetx.applications.not_covered import not_covered
from fleetx.paddle.static import optimizers
from fleetx.paddle.static.optimizers import Parameters
from fleetx.paddle.static.regularization import Clip, L2Decay

__all__ = [
    "SGD",
    "Adam",
    "AdamOptimizer",
    "AdamW",
    "Lamb",
    "LambOptimizer",
    "LarsMomentum",
    "LarsMomentumOptimizer",
    "Momentum",
    "MomentumOptimizer",
    "SGDOptimizer",
]

__getattr__ = not_covered(__name__)


class SGDOptimizer(optimizers.SGD):
    def __init__(
        self,
        learning_rate: Any,
        parameter_list: Parameters = None,
        regularization: L2Decay | None = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
    ):
        super().__init__(learning_rate, parameters=parameter_list, decay=regularization, grad_clip=grad_clip, name=name)


class MomentumOptimizer(optimizers.SGD):
    def __init__(
        self,
        learning_rate: Any,
        momentum: float,
        parameter_list: Parameters = None,
        use_nesterov: bool = False,
        regularization: L2Decay | None = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
    ):
        super().__init__(
            learning_rate, momentum, use_nesterov,
            parameters=parameter_list, decay=regularization, grad_clip=grad_clip, name=name,
        )  # fmt: skip


class AdamOptimizer(optimizers.Adam):
    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameter_list: Parameters = None,
        regularization: L2Decay | None = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
        lazy_mode: bool = False,
    ):
        super().__init__(
            learning_rate, (beta1, beta2), epsilon, lazy_mode,
            parameters=parameter_list, decay=regularization, grad_clip=grad_clip, name=name,
        )  # fmt: skip


class AdamW(optimizers.AdamW):
    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameter_list: Parameters = None,
        weight_decay: float = 0.01,
        grad_clip: Clip | None = None,
        name: str | None = None,
    ):
        super().__init__(
            learning_rate, (beta1, beta2), epsilon, False,
            parameters=parameter_list, decay=weight_decay, grad_clip=grad_clip, name=name,
        )  # fmt: skip


class LambOptimizer(optimizers.LayerwiseAdam):
    def __init__(
        self,
        learning_rate: Any = 0.001,
        lamb_weight_decay: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        parameter_list: Parameters = None,
        regularization: L2Decay | None = None,
        grad_clip: Clip | None = None,
        exclude_from_weight_decay_fn: Callable[[Parameter], bool] | None = None,
        name: str | None = None,
    ):
        super().__init__(
            learning_rate, lamb_weight_decay, (beta1, beta2), epsilon, exclude_from_weight_decay_fn,
            parameters=parameter_list, decay=regularization, grad_clip=grad_clip, name=name,
        )  # fmt: skip


class LarsMomentumOptimizer(optimizers.LarsMomentum):
    def __init__(
        self,
        learning_rate: Any,
        momentum: float,
        lars_coeff: float = 0.001,
        lars_weight_decay: float = 0.0005,
        parameter_list: Parameters = None,
        regularization: L2Decay | None = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
        exclude_from_weight_decay: Sequence[str] | None = None,
        epsilon: float = 0.0,
    ):
        super().__init__(
            learning_rate, momentum, lars_coeff, lars_weight_decay, epsilon, exclude_from_weight_decay or (),
            parameters=parameter_list, decay=regularization, grad_clip=grad_clip, name=name,
        )  # fmt: skip


SGD = SGDOptimizer
Momentum = MomentumOptimizer
Adam = AdamOptimizer
Lamb = LambOptimizer
LarsMomentum = LarsMomentumOptimizer
