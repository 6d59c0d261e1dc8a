"""paddle.optimizer: the optimizers of Paddle 2 (fluid.optimizer renames their arguments), and schedules in `lr`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from fleetx import optim
from fleetx.applications import Application
from fleetx.errors import StrategyError, UsageError
from fleetx.optim import parameter_names
from fleetx.paddle.api.optimizer import lr
from fleetx.paddle.static.optimizers import FLUID_NAMES, REQUIRED, PaddleOptimizer, named_parameters

__all__ = ["SGD", "Adam", "AdamW", "Lamb", "LarsMomentum", "Momentum", "lr"]


class Momentum(PaddleOptimizer):
    arguments = {
        "learning_rate": 0.001, "momentum": 0.9, "parameters": None, "use_nesterov": False, "weight_decay": None,
        "grad_clip": None, "name": None,
    }  # fmt: skip
    also = FLUID_NAMES  # until 2.0-beta, this and the next two were fluid's; scripts from then use its names

    def build(self, application: Application, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        options = {"momentum": self.given["momentum"], "nesterov": self.given["use_nesterov"]}
        return torch.optim.SGD(params, lr=self.get_lr(), weight_decay=self.decay, **options)


class SGD(PaddleOptimizer):
    arguments = {"learning_rate": 0.001, "parameters": None, "weight_decay": None, "grad_clip": None, "name": None}
    also = FLUID_NAMES

    def build(self, application: Application, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.get_lr(), weight_decay=self.decay)


class Adam(PaddleOptimizer):
    arguments = {
        "learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "parameters": None,
        "weight_decay": None, "grad_clip": None, "name": None, "lazy_mode": False,
    }  # fmt: skip
    also = FLUID_NAMES

    def check(self) -> None:
        if self.given.get("lazy_mode"):
            raise UsageError("lazy_mode=True is for sparse gradients, which applications do not have: remove it")

    def build(self, application: Application, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=self.get_lr(), weight_decay=self.decay, **_moments(self.given))


class AdamW(Adam):
    """Weight decay shrinks the parameters instead of changing their gradients.

    apply_decay_param_fun: called with Paddle's name of a parameter; False means no decay.
    """

    arguments = {
        "learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "parameters": None,
        "weight_decay": 0.01, "apply_decay_param_fun": None, "grad_clip": None, "name": None, "lazy_mode": False,
    }  # fmt: skip
    also = {}

    def build(self, application: Application, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        names = {id(p): parameter.name for parameter, p in named_parameters(application)}
        decays = self.given.get("apply_decay_param_fun") or (lambda name: True)
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for p in params:
            groups[bool(decays(names[id(p)]))].append(p)
        made = [{"params": own, "weight_decay": self.decay if on else 0.0} for on, own in groups.items() if own]
        return torch.optim.AdamW(made, lr=self.get_lr(), **_moments(self.given))


class FluidLamb(PaddleOptimizer):
    """With fluid's `regularization`, which Paddle 2 removed."""

    arguments = {
        "learning_rate": 0.001, "lamb_weight_decay": 0.01, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-6,
        "parameters": None, "weight_decay": None, "grad_clip": None, "exclude_from_weight_decay_fn": None, "name": None,
    }  # fmt: skip

    def check(self) -> None:
        _check_single_decay("Lamb", "lamb_weight_decay", self.decay)

    def build(self, application: Application, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        excludes = self.given["exclude_from_weight_decay_fn"]
        out = {id(p) for parameter, p in named_parameters(application) if excludes and excludes(parameter)}
        group = {"params": params, "excluded": [i for i, p in enumerate(params) if id(p) in out]}
        decay = self.given["lamb_weight_decay"]
        return optim.Lamb([group], lr=self.get_lr(), weight_decay=decay, **_moments(self.given))


class FluidLarsMomentum(PaddleOptimizer):
    """With fluid's `regularization`, which Paddle 2 removed."""

    arguments = {
        "learning_rate": 0.001, "momentum": 0.9, "lars_coeff": 0.001, "lars_weight_decay": 0.0005, "parameters": None,
        "weight_decay": None, "grad_clip": None, "name": None, "exclude_from_weight_decay": None, "epsilon": 0.0,
    }  # fmt: skip

    def check(self) -> None:
        _check_single_decay("LarsMomentum", "lars_weight_decay", self.decay)

    def build(self, application: Application, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        patterns = list(self.given["exclude_from_weight_decay"] or ())
        group = {"params": params, "excluded": parameter_names.positions(application, patterns, params)}
        options = {name: self.given[name] for name in ("momentum", "lars_coeff", "epsilon")}
        lars = optim.Lars([group], lr=self.get_lr(), weight_decay=self.given["lars_weight_decay"], **options)
        if problems := list(parameter_names.problems("LarsMomentum", application, lars, patterns)):
            raise StrategyError(problems)
        return lars


def _moments(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"betas": (given["beta1"], given["beta2"]), "eps": given["epsilon"]}


def _check_single_decay(kind: str, own: str, decay: float) -> None:
    if decay:
        raise UsageError(f"{kind} already has {own}, and regularization = {decay} would be added to it: remove one")


def with_arguments(
    base: type[PaddleOptimizer],
    *,
    renamed: Mapping[str, str] | None = None,
    without: Collection[str] = (),
    required: Collection[str] = (),
) -> Any:
    """Derive an optimizer with some arguments renamed ({theirs: ours}), removed, or made required."""
    theirs = {ours: name for name, ours in (renamed or {}).items()}
    kept = {name: default for name, default in base.arguments.items() if name not in without}
    own = {theirs.get(name, name): REQUIRED if name in required else default for name, default in kept.items()}
    return type(base.__name__, (base,), {"arguments": own, "__doc__": base.__doc__})


Lamb = with_arguments(FluidLamb, without=["weight_decay"])
LarsMomentum = with_arguments(FluidLarsMomentum, without=["weight_decay"])

# fluid's optimizers, each under its short and its long name.
_WITH_MOMENTUM = ["learning_rate", "momentum"]
FLUID: dict[str, Any] = {
    "SGD": with_arguments(SGD, renamed=FLUID_NAMES, required=["learning_rate"]),
    "Momentum": with_arguments(Momentum, renamed=FLUID_NAMES, required=_WITH_MOMENTUM),
    "Adam": with_arguments(Adam, renamed=FLUID_NAMES),
    "Lamb": with_arguments(FluidLamb, renamed=FLUID_NAMES),
    "LarsMomentum": with_arguments(FluidLarsMomentum, renamed=FLUID_NAMES, required=_WITH_MOMENTUM),
}
FLUID |= {f"{name}Optimizer": made for name, made in FLUID.items()}
_NOT_IN_FLUID = ["apply_decay_param_fun", "lazy_mode"]
FLUID["AdamW"] = with_arguments(AdamW, renamed={"parameter_list": "parameters"}, without=_NOT_IN_FLUID)
