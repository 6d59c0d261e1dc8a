"""The formulas in float64: the reference for both sides."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.linalg import norm

from benchmarks.paddle_agreement.cases import Arrays, Case


def run(case: Case, steps: int) -> Arrays:
    """Every parameter after 0, 1, ... `steps` steps."""
    one = _lars if case.optimizer == "lars" else _lamb
    rates = case.learning_rates(steps).astype(np.float64)
    gradients = case.gradients(steps)
    paths = {}
    for name, start in case.starts().items():
        path = [start.astype(np.float64)]
        state: dict[str, np.ndarray] = {}
        settings = case.settings | ({"weight_decay": 0.0} if name in case.excluded else {})
        for t, g in enumerate(gradients[name].astype(np.float64)):
            adapt = name not in case.excluded or bool(settings.get("always_adapt"))
            path.append(one(path[-1], g, state, rates[t], t + 1, settings, adapt))
        paths[name] = np.stack(path)
    return paths


def _lars(p: Any, g: Any, state: Any, lr: Any, t: int, s: Any, adapt: bool) -> Any:
    wd, local = s["weight_decay"], lr
    if wd > 0 and norm(p) > 0 and norm(g) > 0:
        local = lr * s["lars_coeff"] * norm(p) / (norm(g) + wd * norm(p) + s["epsilon"])
    state["v"] = s["momentum"] * state.get("v", 0.0) + local * (g + wd * p)
    return p - state["v"]


def _lamb(p: Any, g: Any, state: Any, lr: Any, t: int, s: Any, adapt: bool) -> Any:
    b1, b2 = s["beta1"], s["beta2"]
    state["m"] = b1 * state.get("m", 0.0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0.0) + (1 - b2) * g * g
    u = state["m"] / (1 - b1**t) / (np.sqrt(state["v"] / (1 - b2**t)) + s["epsilon"]) + s["weight_decay"] * p
    r = norm(p) / norm(u) if adapt and norm(p) > 0 and norm(u) > 0 else 1.0
    return p - lr * r * u
