"""Optimizers of a Paddle script: recipes to build torch's optimizers. The classes are in ../api/optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import nn

from fleetx.applications import Application, Parameter, Program, Variable
from fleetx.applications.not_covered import not_covered_by
from fleetx.errors import UsageError
from fleetx.paddle.static import programs, rates, training
from fleetx.paddle.static.regularization import ClipByGlobalNorm, L2Decay
from fleetx.strategy import DistributedStrategy

Parameters = training.Parameters
REQUIRED = inspect.Parameter.empty  # instead of a default
FLUID_NAMES = {"parameter_list": "parameters", "regularization": "weight_decay"}
_SUPPORTED = "paddle.optimizer.Optimizer", ("minimize", "get_lr", "set_lr")


class PaddleOptimizer:
    """What a script says about an optimizer. `minimize(loss)` assigns it to the program of the loss."""

    arguments: ClassVar[Mapping[str, Any]]
    """Paddle's argument names, in order, with their defaults."""
    also: ClassVar[Mapping[str, str]] = {}
    """Other accepted names, {theirs: ours}."""
    application: Application | None = None  # set by minimize

    def __init_subclass__(cls) -> None:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        own = [inspect.Parameter(name, kind, default=default) for name, default in cls.arguments.items()]
        cls.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **kwargs: Any):
        for theirs, ours in self.also.items():
            if theirs in kwargs and ours in self.arguments and ours not in kwargs:
                kwargs[ours] = kwargs.pop(theirs)
        bound = rates.arguments_of(type(self), args, kwargs)
        given = self.given = {FLUID_NAMES.get(name, name): value for name, value in bound.items()}
        self.rate, self.name = rates.checked(given["learning_rate"]), given["name"]
        self.parameters, self.decay = training.as_list(given["parameters"]), _decay(given.get("weight_decay"))
        self.clip: ClipByGlobalNorm | None = given["grad_clip"]
        if not isinstance(self.clip, ClipByGlobalNorm | None):
            raise UsageError(
                f"grad_clip = {self.clip!r}: must be a GradientClipByGlobalNorm (ClipGradByGlobalNorm in Paddle 2)"
            )
        self.check()

    def check(self) -> None:
        """Raise an error for arguments of this optimizer that do not fit together."""

    def minimize(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Parameters = None,
        no_grad_set: Parameters = None,
    ) -> tuple[list[Any], list[Any]]:
        """Train the program of `loss` on this worker only."""
        training.init_single_worker()
        single = DistributedOptimizer(self, DistributedStrategy())
        return single.minimize(loss, startup_program, parameter_list, no_grad_set)

    def get_lr(self) -> float:
        """Return the learning rate of the next run."""
        return rates.at(self.rate, 0 if self.application is None else training.run_count(self.application))

    def set_lr(self, value: float) -> None:
        if callable(self.rate):
            raise UsageError("the learning rate is a schedule, which set_lr would replace: change the schedule instead")
        self.rate = rates.checked(value)

    def build(self, application: Application, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Build torch's optimizer."""
        raise NotImplementedError

    __getattr__ = not_covered_by(*_SUPPORTED)


class DistributedOptimizer:
    """A Paddle optimizer with a strategy: what fleet.distributed_optimizer returns to a static script."""

    def __init__(self, recipe: PaddleOptimizer, strategy: DistributedStrategy | None):
        self.recipe, self.strategy = recipe, training.prepare_strategy(strategy, recipe.clip)  # checked at once

    def minimize(
        self,
        loss: Variable,
        startup_program: Program | None = None,
        parameter_list: Parameters = None,
        no_grad_set: Parameters = None,
    ) -> tuple[list[Any], list[Any]]:
        """Train the program of `loss` on all workers. Returns Paddle's two lists, which are empty here."""
        if startup_program is not None and startup_program.application is not getattr(loss, "application", None):
            raise UsageError("startup_program belongs to a different model than the loss: remove it")
        only = self.recipe.parameters if parameter_list is None else parameter_list
        strategy = training.prepare_strategy(self.strategy, self.recipe.clip or programs.script().clip)
        training.minimize(loss, self.recipe, strategy, only, no_grad_set)
        return [], []

    def get_lr(self) -> float:
        return self.recipe.get_lr()

    def set_lr(self, value: float) -> None:
        self.recipe.set_lr(value)

    __getattr__ = not_covered_by(*_SUPPORTED)


def named_parameters(application: Application) -> list[tuple[Parameter, nn.Parameter]]:
    """Pair Paddle's parameters with torch's."""
    return list(zip(application.parameter_list(), application.parameters(), strict=True))


def _decay(value: Any) -> float:
    coeff = value.coeff if isinstance(value, L2Decay) else 0.0 if value is None else value
    if isinstance(coeff, bool) or not isinstance(coeff, Real) or coeff < 0:
        raise UsageError(f"weight decay = {value!r}: must be an L2Decay(coeff) or a number of at least 0")
    return float(coeff)
