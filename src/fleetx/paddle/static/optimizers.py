"""Optimizers as a script describes them. `minimize(loss)` gives the description to the program of the loss.

What differs between `fluid.optimizer` and `paddle.optimizer` is how they are written: their signatures are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import nn

from fleetx.applications import Application, Parameter, Program, Variable
from fleetx.applications.not_covered import not_covered_by
from fleetx.errors import StrategyError, UsageError
from fleetx.optim import Lamb, Lars, exclusion
from fleetx.paddle.static import rates, training
from fleetx.paddle.static.regularization import Clip, L2Decay
from fleetx.strategy import DistributedStrategy

Parameters = training.Parameters
_COVERED = "paddle.optimizer.Optimizer", ("minimize", "get_lr", "set_lr")


class Described:
    """What a script says of an optimizer."""

    application: Application | None = None  # that it trains

    def __init__(
        self,
        learning_rate: Any,
        *,
        parameters: Parameters = None,
        decay: float | L2Decay | None = None,
        grad_clip: Clip | None = None,
        name: str | None = None,
    ):
        self.rate = rates.checked(learning_rate)
        self.parameters, self.decay, self.name = training.several(parameters), _decay(decay), name
        if not isinstance(grad_clip, Clip | None):
            raise UsageError(
                f"grad_clip = {grad_clip!r}: fleetx covers GradientClipByGlobalNorm (ClipGradByGlobalNorm)"
            )
        self.clip = grad_clip

    def minimize(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Parameters = None,
        no_grad_set: Parameters = None,
    ) -> tuple[list[Any], list[Any]]:
        """Train the program of `loss` on this worker alone."""
        training.alone()
        alone = Distributed(self, DistributedStrategy())
        return alone.minimize(loss, startup_program, parameter_list, no_grad_set)

    def get_lr(self) -> float:
        """The rate of the next run."""
        return rates.at(self.rate, 0 if self.application is None else training.runs(self.application))

    def set_lr(self, value: float) -> None:
        if callable(self.rate):
            raise UsageError("the learning rate is a schedule, which set_lr would replace: change the schedule instead")
        self.rate = rates.checked(value)

    def make(self, application: Application, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of torch."""
        raise NotImplementedError

    __getattr__ = not_covered_by(*_COVERED)


class Distributed:
    """A described optimizer with a strategy: what fleet.distributed_optimizer gives a static script."""

    def __init__(self, described: Described, strategy: DistributedStrategy | None):
        self.described, self.strategy = described, training.declared(strategy, described.clip)

    def minimize(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Parameters = None,
        no_grad_set: Parameters = None,
    ) -> tuple[list[Any], list[Any]]:
        """Train the program of `loss` with all workers. Returns Paddle's two lists, which are empty here."""
        if startup_program is not None and startup_program.application is not getattr(loss, "application", None):
            raise UsageError("startup_program belongs to another model than the loss: leave it out")
        only = self.described.parameters if parameter_list is None else parameter_list
        training.describe(loss, self.described, self.strategy, only, no_grad_set)
        return [], []

    def get_lr(self) -> float:
        return self.described.get_lr()

    def set_lr(self, value: float) -> None:
        self.described.set_lr(value)

    __getattr__ = not_covered_by(*_COVERED)


class SGD(Described):
    """With momentum it is Paddle's Momentum: the two have the same formula in torch."""

    def __init__(self, learning_rate: Any, momentum: float = 0.0, nesterov: bool = False, **common: Any):
        super().__init__(learning_rate, **common)
        self.momentum, self.nesterov = momentum, nesterov

    def make(self, application: Application, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            params, lr=self.get_lr(), momentum=self.momentum, nesterov=self.nesterov, weight_decay=self.decay
        )


class Adam(Described):
    def __init__(self, learning_rate: Any, betas: tuple[float, float], epsilon: float, lazy_mode: bool, **common: Any):
        super().__init__(learning_rate, **common)
        self.betas, self.epsilon = betas, epsilon
        if lazy_mode:
            raise UsageError("lazy_mode=True is for sparse gradients, which applications have not: leave it out")

    def make(self, application: Application, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=self.get_lr(), betas=self.betas, eps=self.epsilon, weight_decay=self.decay)


class AdamW(Adam):
    """Its decay shrinks the parameters instead of changing their gradients."""

    def __init__(self, *described: Any, decays: Callable[[str], bool] | None = None, **common: Any):
        super().__init__(*described, **common)
        self.decays = decays

    def make(self, application: Application, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        names = {id(p): parameter.name for parameter, p in described(application)}
        chosen = [p for p in params if self.decays is None or self.decays(names[id(p)])]
        kept = {id(p) for p in chosen}
        groups: list[dict[str, Any]] = [{"params": chosen, "weight_decay": self.decay}]
        groups.append({"params": [p for p in params if id(p) not in kept], "weight_decay": 0.0})
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(groups, lr=self.get_lr(), betas=self.betas, eps=self.epsilon)


class LarsMomentum(Described):
    def __init__(
        self,
        learning_rate: Any,
        momentum: float,
        lars_coeff: float,
        lars_weight_decay: float,
        epsilon: float,
        exclude: Sequence[str],
        **common: Any,
    ):
        super().__init__(learning_rate, **common)
        _refuse_second_decay("LarsMomentum", "lars_weight_decay", self.decay)
        self.options: dict[str, Any] = {"momentum": momentum, "lars_coeff": lars_coeff, "epsilon": epsilon}
        self.options["weight_decay"], self.exclude = lars_weight_decay, list(exclude)

    def make(self, application: Application, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        excluded = exclusion.positions(application, self.exclude, params)
        made = Lars([{"params": params, "excluded": excluded}], lr=self.get_lr(), **self.options)
        if problems := list(exclusion.problems("LarsMomentum", application, made, self.exclude)):
            raise StrategyError(problems)
        return made


class LayerwiseAdam(Described):
    def __init__(
        self,
        learning_rate: Any,
        lamb_weight_decay: float,
        betas: tuple[float, float],
        epsilon: float,
        excludes: Callable[[Parameter], bool] | None,
        **common: Any,
    ):
        super().__init__(learning_rate, **common)
        _refuse_second_decay("Lamb", "lamb_weight_decay", self.decay)
        self.options: dict[str, Any] = {"betas": betas, "eps": epsilon, "weight_decay": lamb_weight_decay}
        self.excludes = excludes

    def make(self, application: Application, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        out = {id(p) for parameter, p in described(application) if self.excludes and self.excludes(parameter)}
        excluded = [i for i, p in enumerate(params) if id(p) in out]
        return Lamb([{"params": params, "excluded": excluded}], lr=self.get_lr(), **self.options)


def described(application: Application) -> list[tuple[Parameter, nn.Parameter]]:
    """Parameters with their descriptions."""
    return list(zip(application.parameter_list(), application.parameters(), strict=True))


def _decay(value: Any) -> float:
    found = value.coeff if isinstance(value, L2Decay) else 0.0 if value is None else value
    if isinstance(found, bool) or not isinstance(found, Real) or found < 0:
        raise UsageError(f"{value!r} as a decay: fleetx covers L2Decay(coeff), or its coefficient, of at least 0")
    return float(found)


def _refuse_second_decay(kind: str, own: str, decay: float) -> None:
    if decay:
        raise UsageError(f"{kind} has {own}, and another decay of {decay} would come on top of it: keep one")
