"""paddle.optimizer: the optimizers of Paddle 2 (fluid.optimizer renames their arguments), and schedules in `lr`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fleetx import optim
from fleetx.applications import Application, Parameter
from fleetx.errors import StrategyError, UsageError
from fleetx.optim import exclusion
from fleetx.paddle.api.optimizer import lr
from fleetx.paddle.static.optimizers import PaddleOptimizer, Parameters, named_parameters
from fleetx.paddle.static.regularization import Clip, L2Decay

__all__ = ["SGD", "Adam", "AdamW", "Lamb", "LarsMomentum", "Momentum", "lr"]

Decay = float | L2Decay | None
FLUID_NAMES = {"parameter_list": "parameters", "regularization": "weight_decay"}


def accept_fluid_names(cls: type[PaddleOptimizer]) -> Any:
    """Until Paddle 2.0-beta these classes were fluid's, and scripts of that time pass its names."""
    init = cls.__init__

    @functools.wraps(init)
    def __init__(self: PaddleOptimizer, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        for theirs, ours in FLUID_NAMES.items():
            if theirs in kwargs and ours not in kwargs:
                kwargs[ours] = kwargs.pop(theirs)
        init(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


@accept_fluid_names
class Momentum(PaddleOptimizer):
    def __init__(
        self,
        learning_rate: Any = 0.001,
        momentum: float = 0.9,
        parameters: Parameters = None,
        use_nesterov: bool = False,
        weight_decay: Decay = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
    ):
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name)
        self.momentum, self.nesterov = momentum, use_nesterov

    def build(self, application: Application, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            params, lr=self.get_lr(), momentum=self.momentum, nesterov=self.nesterov, weight_decay=self.decay
        )


@accept_fluid_names
class SGD(Momentum):
    def __init__(
        self,
        learning_rate: Any = 0.001,
        parameters: Parameters = None,
        weight_decay: Decay = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
    ):
        super().__init__(learning_rate, 0.0, parameters, False, weight_decay, grad_clip, name)


@accept_fluid_names
class Adam(PaddleOptimizer):
    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        parameters: Parameters = None,
        weight_decay: Decay = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
        lazy_mode: bool = False,
    ):
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name)
        self.betas, self.epsilon = (beta1, beta2), epsilon
        if lazy_mode:
            raise UsageError("lazy_mode=True is for sparse gradients, which applications do not have: remove it")

    def build(self, application: Application, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=self.get_lr(), betas=self.betas, eps=self.epsilon, weight_decay=self.decay)


class AdamW(Adam):
    """Weight decay shrinks the parameters instead of changing their gradients."""

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
        """apply_decay_param_fun: called with Paddle's name of a parameter; False means no decay."""
        super().__init__(learning_rate, beta1, beta2, epsilon, parameters, weight_decay, grad_clip, name, lazy_mode)
        self.decays = apply_decay_param_fun

    def build(self, application: Application, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        names = {id(p): parameter.name for parameter, p in named_parameters(application)}
        decayed = [p for p in params if self.decays is None or self.decays(names[id(p)])]
        ids = {id(p) for p in decayed}
        groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": self.decay}]
        groups.append({"params": [p for p in params if id(p) not in ids], "weight_decay": 0.0})
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(groups, lr=self.get_lr(), betas=self.betas, eps=self.epsilon)


class FluidLamb(PaddleOptimizer):
    """With fluid's `regularization`, which Paddle 2 removed."""

    def __init__(
        self,
        learning_rate: Any = 0.001,
        lamb_weight_decay: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        parameters: Parameters = None,
        weight_decay: Decay = None,
        grad_clip: Clip | None = None,
        exclude_from_weight_decay_fn: Callable[[Parameter], bool] | None = None,
        name: str | None = None,
    ):
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name)
        _check_single_decay("Lamb", "lamb_weight_decay", self.decay)
        self.options: dict[str, Any] = {"betas": (beta1, beta2), "eps": epsilon, "weight_decay": lamb_weight_decay}
        self.excludes = exclude_from_weight_decay_fn

    def build(self, application: Application, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        out = {id(p) for parameter, p in named_parameters(application) if self.excludes and self.excludes(parameter)}
        excluded = [i for i, p in enumerate(params) if id(p) in out]
        return optim.Lamb([{"params": params, "excluded": excluded}], lr=self.get_lr(), **self.options)


class FluidLarsMomentum(PaddleOptimizer):
    """With fluid's `regularization`, which Paddle 2 removed."""

    def __init__(
        self,
        learning_rate: Any = 0.001,
        momentum: float = 0.9,
        lars_coeff: float = 0.001,
        lars_weight_decay: float = 0.0005,
        parameters: Parameters = None,
        weight_decay: Decay = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
        exclude_from_weight_decay: Sequence[str] | None = None,
        epsilon: float = 0.0,
    ):
        super().__init__(learning_rate, parameters, weight_decay, grad_clip, name)
        _check_single_decay("LarsMomentum", "lars_weight_decay", self.decay)
        self.options: dict[str, Any] = {"momentum": momentum, "lars_coeff": lars_coeff, "epsilon": epsilon}
        self.options["weight_decay"], self.exclude = lars_weight_decay, list(exclude_from_weight_decay or ())

    def build(self, application: Application, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        excluded = exclusion.positions(application, self.exclude, params)
        lars = optim.Lars([{"params": params, "excluded": excluded}], lr=self.get_lr(), **self.options)
        if problems := list(exclusion.problems("LarsMomentum", application, lars, self.exclude)):
            raise StrategyError(problems)
        return lars


def _check_single_decay(kind: str, own: str, decay: float) -> None:
    if decay:
        raise UsageError(f"{kind} already has {own}, and regularization = {decay} would be added to it: remove one")


def with_arguments(
    base: type[PaddleOptimizer],
    *,
    renamed: Mapping[str, str] | None = None,
    without: Sequence[str] = (),
    required: Sequence[str] = (),
) -> Any:
    """Derive an optimizer whose arguments are renamed ({theirs: ours}), removed, or lose their default."""
    renamed = renamed or {}
    theirs = {ours: name for name, ours in renamed.items()}
    ours = [p for p in inspect.signature(base).parameters.values() if p.name not in without]
    signature = inspect.Signature(
        [p.replace(name=theirs.get(p.name, p.name), default=p.empty if p.name in required else p.default) for p in ours]
    )

    def __init__(self: PaddleOptimizer, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        given = signature.bind(*args, **kwargs).arguments
        base.__init__(self, **{renamed.get(name, name): value for name, value in given.items()})

    return type(base.__name__, (base,), {"__init__": __init__, "__signature__": signature, "__doc__": base.__doc__})


Lamb = with_arguments(FluidLamb, without=["weight_decay"])
LarsMomentum = with_arguments(FluidLarsMomentum, without=["weight_decay"])
