"""paddle.optimizer: the optimizers of Paddle 2, and their schedules in `lr`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fleetx.applications import Parameter
from fleetx.applications.not_covered import not_covered
from fleetx.paddle.api.optimizer import lr
from fleetx.paddle.static import optimizers
from fleetx.paddle.static.optimizers import Parameters
from fleetx.paddle.static.regularization import Clip, L2Decay

__all__ = ["SGD", "Adam", "AdamW", "Lamb", "LarsMomentum", "Momentum", "lr"]

__getattr__ = not_covered(__name__)


class SGD(optimizers.SGD):
    def __init__(
        self,
        learning_rate: Any = 0.001,
        parameters: Parameters = None,
        weight_decay: float | L2Decay | None = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
    ):
        super().__init__(learning_rate, parameters=parameters, decay=weight_decay, grad_clip=grad_clip, name=name)


class Momentum(optimizers.SGD):
    def __init__(
        self,
        learning_rate: Any = 0.001,
        momentum: float = 0.9,
        parameters: Parameters = None,
        use_nesterov: bool = False,
        weight_decay: float | L2Decay | None = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
    ):
        super().__init__(
            learning_rate, momentum, use_nesterov,
            parameters=parameters, decay=weight_decay, grad_clip=grad_clip, name=name,
        )  # fmt: skip


class Adam(optimizers.Adam):
    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameters: Parameters = None,
        weight_decay: float | L2Decay | None = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
        lazy_mode: bool = False,
    ):
        super().__init__(
            learning_rate, (beta1, beta2), epsilon, lazy_mode,
            parameters=parameters, decay=weight_decay, grad_clip=grad_clip, name=name,
        )  # fmt: skip


class AdamW(optimizers.AdamW):
    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameters: Parameters = None,
        weight_decay: float = 0.01,
        apply_decay_param_fun: Callable[[str], bool] | None = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
        lazy_mode: bool = False,
    ):
        """apply_decay_param_fun: is given Paddle's name of a parameter; those for which it is False do not decay."""
        super().__init__(
            learning_rate, (beta1, beta2), epsilon, lazy_mode, decays=apply_decay_param_fun,
            parameters=parameters, decay=weight_decay, grad_clip=grad_clip, name=name,
        )  # fmt: skip


class Lamb(optimizers.LayerwiseAdam):
    def __init__(
        self,
        learning_rate: Any = 0.001,
        lamb_weight_decay: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        parameters: Parameters = None,
        grad_clip: Clip | None = None,
        exclude_from_weight_decay_fn: Callable[[Parameter], bool] | None = None,
        name: str | None = None,
    ):
        super().__init__(
            learning_rate, lamb_weight_decay, (beta1, beta2), epsilon, exclude_from_weight_decay_fn,
            parameters=parameters, grad_clip=grad_clip, name=name,
        )  # fmt: skip


class LarsMomentum(optimizers.LarsMomentum):
    def __init__(
        self,
        learning_rate: Any = 0.001,
        momentum: float = 0.9,
        lars_coeff: float = 0.001,
        lars_weight_decay: float = 0.0005,
        parameters: Parameters = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
        exclude_from_weight_decay: Sequence[str] | None = None,
        epsilon: float = 0.0,
    ):
        super().__init__(
            learning_rate, momentum, lars_coeff, lars_weight_decay, epsilon, exclude_from_weight_decay or (),
            parameters=parameters, grad_clip=grad_clip, name=name,
        )  # fmt: skip
