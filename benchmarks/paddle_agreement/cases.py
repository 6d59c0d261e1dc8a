"""What is compared. A case names its optimizer and its settings in Paddle's words; the numbers are random but fixed."""

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
    excluded: tuple[str, ...] = ()  # names of parameters without decay
    still: tuple[str, ...] = ()  # parameters whose gradient is zero in every step
    pausing: tuple[str, ...] = ()  # those whose gradient is zero in every third step
    born_zero: tuple[str, ...] = ()  # those that begin at zero
    rates: str = "constant"
    differs: str = ""  # what is known to be otherwise in Paddle; then it must be so

    def starts(self) -> Arrays:
        made = np.random.default_rng(1)
        values = {n: made.standard_normal(s).astype(np.float32) * np.float32(0.5) for n, s in SHAPES.items()}
        return {n: np.zeros_like(v) if n in self.born_zero else v for n, v in values.items()}

    def gradients(self, steps: int) -> Arrays:
        """One array for each parameter, by step. A drift and noise: so that both the mean and the square matter."""
        made = np.random.default_rng(2)
        found = {}
        for name, shape in SHAPES.items():
            drift = made.standard_normal(shape)
            size = 10.0 ** made.uniform(-3, 1, (steps,) + (1,) * len(shape))  # from step to step over four decades
            g = (size * (drift + made.standard_normal((steps, *shape)))).astype(np.float32)
            if name in self.still:
                g[:] = 0
            if name in self.pausing:
                g[::3] = 0
            found[name] = g
        return found

    def learning_rates(self, steps: int) -> np.ndarray:
        peak = 1.0 if self.optimizer == "lars" else 0.02
        t = np.arange(steps)
        share = np.minimum((t + 1) / 10, ((steps - t) / steps) ** 2) if self.rates == "changing" else np.ones(steps)
        return (peak * share).astype(np.float32)  # Paddle's are float32


@dataclass(frozen=True)
class _Kind:
    optimizer: str
    settings: dict[str, float | bool] = field(default_factory=dict)

    def case(self, name: str, **more: object) -> Case:
        settings = self.settings | more.pop("settings", {})  # type: ignore[operator]
        return Case(f"{self.optimizer}: {name}", self.optimizer, settings, **more)  # type: ignore[arg-type]


# A coefficient of 0.02 and an epsilon of 1e-3 or 0.5 are larger than one would train with: a wrong place shows.
_LARS = _Kind("lars", {"momentum": 0.9, "lars_coeff": 0.02, "weight_decay": 0.01, "epsilon": 0.0})
_LAMB = _Kind("lamb", {"beta1": 0.9, "beta2": 0.99, "epsilon": 1e-3, "weight_decay": 0.05, "always_adapt": False})
_SMALL = ("fc_b", "norm_scale")

CASES = [
    _LARS.case("decay"),
    _LARS.case("exclusion by name", excluded=_SMALL),
    _LARS.case("epsilon", settings={"epsilon": 0.5}),
    _LARS.case("no decay at all", settings={"weight_decay": 0.0}),
    _LARS.case("zero gradient", still=("conv_w", "norm_scale"), pausing=("fc_w",), excluded=("norm_scale",)),
    _LARS.case("zero parameter", born_zero=("conv_w", "fc_b"), excluded=("fc_b",)),
    _LARS.case("both zero", born_zero=("conv_w",), still=("conv_w",)),
    _LARS.case("changing rate", rates="changing", excluded=_SMALL),
    _LAMB.case("decay"),
    _LAMB.case("default betas and epsilon", settings={"beta2": 0.999, "epsilon": 1e-6, "weight_decay": 0.01}),
    _LAMB.case("exclusion by function", excluded=_SMALL),
    _LAMB.case("exclusion, always_adapt", settings={"always_adapt": True}, excluded=_SMALL),
    _LAMB.case("everything excluded", excluded=tuple(SHAPES)),
    _LAMB.case("no decay at all", settings={"weight_decay": 0.0}, differs="r = 1 there"),
    _LAMB.case("no decay, always_adapt", settings={"weight_decay": 0.0, "always_adapt": True}),
    _LAMB.case("zero gradient", still=("conv_w", "norm_scale"), pausing=("fc_w",), excluded=("norm_scale",)),
    _LAMB.case("zero parameter", born_zero=("conv_w", "fc_b"), excluded=("fc_b",)),
    _LAMB.case("both zero", born_zero=("conv_w",), still=("conv_w",)),
    _LAMB.case(
        "zero step, always_adapt", settings={"weight_decay": 0.0, "always_adapt": True}, still=("conv_w", "fc_b")
    ),
    _LAMB.case("changing rate", rates="changing", excluded=_SMALL),
]
