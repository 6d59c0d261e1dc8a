"""What is compared: optimizers with settings under Paddle's names, and random but fixed numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

Arrays = dict[str, np.ndarray]

SHAPES = {"fc_w": (40, 30), "conv_w": (8, 4, 3, 3), "fc_b": (30,), "norm_scale": (16,)}


@dataclass(frozen=True)
class Case:
    name: str
    optimizer: str  # "lars" or "lamb"
    settings: dict[str, float | bool]
    excluded: tuple[str, ...] = ()  # parameters without decay
    zero_gradient: tuple[str, ...] = ()  # parameters whose gradient is always zero
    sometimes_zero: tuple[str, ...] = ()  # parameters whose gradient is zero in every third step
    zero_start: tuple[str, ...] = ()  # parameters that start at zero
    rates: str = "constant"
    differs: str = ""  # a known difference of Paddle, which must then be observed

    def starts(self) -> Arrays:
        source = np.random.default_rng(1)
        values = {n: source.standard_normal(s).astype(np.float32) * np.float32(0.5) for n, s in SHAPES.items()}
        return {n: np.zeros_like(v) if n in self.zero_start else v for n, v in values.items()}

    def gradients(self, steps: int) -> Arrays:
        """One array per parameter, by step: drift plus noise, so that both the mean and the square matter."""
        source = np.random.default_rng(2)
        gradients = {}
        for name, shape in SHAPES.items():
            drift = source.standard_normal(shape)
            size = 10.0 ** source.uniform(-3, 1, (steps,) + (1,) * len(shape))  # varies over four decades
            g = (size * (drift + source.standard_normal((steps, *shape)))).astype(np.float32)
            if name in self.zero_gradient:
                g[:] = 0
            if name in self.sometimes_zero:
                g[::3] = 0
            gradients[name] = g
        return gradients

    def learning_rates(self, steps: int) -> np.ndarray:
        peak = 1.0 if self.optimizer == "lars" else 0.02
        t = np.arange(steps)
        factor = np.minimum((t + 1) / 10, ((steps - t) / steps) ** 2) if self.rates == "changing" else np.ones(steps)
        return (peak * factor).astype(np.float32)  # like Paddle's


@dataclass(frozen=True)
class _Kind:
    optimizer: str
    settings: dict[str, float | bool] = field(default_factory=dict)

    def case(self, name: str, **more: object) -> Case:
        settings = self.settings | more.pop("settings", {})  # type: ignore[operator]
        return Case(f"{self.optimizer}: {name}", self.optimizer, settings, **more)  # type: ignore[arg-type]


# A coefficient of 0.02 and an epsilon of 1e-3 or 0.5 are larger than in training, so that a misplaced one shows.
_LARS = _Kind("lars", {"momentum": 0.9, "lars_coeff": 0.02, "weight_decay": 0.01, "epsilon": 0.0})
_LAMB = _Kind("lamb", {"beta1": 0.9, "beta2": 0.99, "epsilon": 1e-3, "weight_decay": 0.05, "always_adapt": False})
_SMALL = ("fc_b", "norm_scale")

CASES = [
    _LARS.case("decay"),
    _LARS.case("exclusion by name", excluded=_SMALL),
    _LARS.case("epsilon", settings={"epsilon": 0.5}),
    _LARS.case("no decay at all", settings={"weight_decay": 0.0}),
    _LARS.case(
        "zero gradient", zero_gradient=("conv_w", "norm_scale"), sometimes_zero=("fc_w",), excluded=("norm_scale",)
    ),
    _LARS.case("zero parameter", zero_start=("conv_w", "fc_b"), excluded=("fc_b",)),
    _LARS.case("both zero", zero_start=("conv_w",), zero_gradient=("conv_w",)),
    _LARS.case("changing rate", rates="changing", excluded=_SMALL),
    _LAMB.case("decay"),
    _LAMB.case("default betas and epsilon", settings={"beta2": 0.999, "epsilon": 1e-6, "weight_decay": 0.01}),
    _LAMB.case("exclusion by function", excluded=_SMALL),
    _LAMB.case("exclusion, always_adapt", settings={"always_adapt": True}, excluded=_SMALL),
    _LAMB.case("everything excluded", excluded=tuple(SHAPES)),
    _LAMB.case("no decay at all", settings={"weight_decay": 0.0}, differs="r = 1 there"),
    _LAMB.case("no decay, always_adapt", settings={"weight_decay": 0.0, "always_adapt": True}),
    _LAMB.case(
        "zero gradient", zero_gradient=("conv_w", "norm_scale"), sometimes_zero=("fc_w",), excluded=("norm_scale",)
    ),
    _LAMB.case("zero parameter", zero_start=("conv_w", "fc_b"), excluded=("fc_b",)),
    _LAMB.case("both zero", zero_start=("conv_w",), zero_gradient=("conv_w",)),
    _LAMB.case(
        "zero step, always_adapt",
        settings={"weight_decay": 0.0, "always_adapt": True},
        zero_gradient=("conv_w", "fc_b"),
    ),
    _LAMB.case("changing rate", rates="changing", excluded=_SMALL),
]
