"""fleetx.optim, with Paddle's settings in its words."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from benchmarks.paddle_agreement.cases import Arrays, Case
from fleetx.optim import Lamb, Lars, native


def ways() -> list[str]:
    """The kernels of fleetx.optim that there are here; each must agree."""
    return ["compiled"] * native.available() + ["stock", "foreach"]


def run(case: Case, steps: int, way: str) -> Arrays:
    """Every parameter after 0, 1, ... `steps` steps."""
    before = os.environ.get("FLEETX_KERNELS", "")
    os.environ["FLEETX_KERNELS"] = "" if way == "foreach" else way
    try:
        return _run(case, steps, scattered=way == "foreach")
    finally:
        os.environ["FLEETX_KERNELS"] = before


def _parameter(start: np.ndarray, *, scattered: bool) -> torch.Tensor:
    """Scattered: every second number in memory, which only torch's foreach functions take."""
    p = torch.zeros(*start.shape, 2)[..., 0] if scattered else torch.zeros(start.shape)
    return p.copy_(torch.tensor(start)).requires_grad_()


def _run(case: Case, steps: int, *, scattered: bool) -> Arrays:
    params = {n: _parameter(v, scattered=scattered) for n, v in case.starts().items()}
    optimizer = _optimizer(case, params)
    paths = {n: [p.detach().numpy().copy()] for n, p in params.items()}
    gradients = case.gradients(steps)
    for t, rate in enumerate(case.learning_rates(steps)):
        for group in optimizer.param_groups:
            group["lr"] = float(rate)
        for n, p in params.items():
            p.grad = torch.tensor(gradients[n][t])
        optimizer.step()
        for n, p in params.items():
            paths[n].append(p.detach().numpy().copy())
    return {n: np.stack(path) for n, path in paths.items()}


def _optimizer(case: Case, params: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
    s: dict[str, Any] = dict(case.settings)
    without: dict[str, Any] = {"params": [p for n, p in params.items() if n in case.excluded], "weight_decay": 0.0}
    groups: list[dict[str, Any]] = [{"params": [p for n, p in params.items() if n not in case.excluded]}, without]
    groups = [g for g in groups if g["params"]]
    if case.optimizer == "lars":
        return Lars(groups, lr=1.0, **s)
    without["adapt"] = s["always_adapt"]
    return Lamb(groups, betas=(s["beta1"], s["beta2"]), eps=s["epsilon"], weight_decay=s["weight_decay"])
