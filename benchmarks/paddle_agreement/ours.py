"""fleetx.optim, with settings under Paddle's names."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.paddle_agreement.cases import Arrays, Case
from fleetx.optim import Lamb, Lars, native

STRIDED = "foreach, strided"  # every second number in memory, for which foreach does not use torch's fused kernels


def kernels() -> list[str]:
    """The kernels of fleetx.optim on this machine, which must all agree."""
    return ["compiled"] * native.available() + ["foreach", STRIDED]


def run(case: Case, steps: int, kernels: str) -> Arrays:
    """Every parameter after 0, 1, ... `steps` steps."""
    with patch.dict(os.environ, FLEETX_KERNELS=kernels.removesuffix(", strided")):
        params = {n: _parameter(v, strided=kernels == STRIDED) for n, v in case.starts().items()}
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


def _parameter(start: np.ndarray, *, strided: bool) -> torch.Tensor:
    p = torch.zeros(*start.shape, 2)[..., 0] if strided else torch.zeros(start.shape)
    return p.copy_(torch.tensor(start)).requires_grad_()


def _optimizer(case: Case, params: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
    s: dict[str, Any] = dict(case.settings)
    without: dict[str, Any] = {"params": [p for n, p in params.items() if n in case.excluded], "weight_decay": 0.0}
    groups: list[dict[str, Any]] = [{"params": [p for n, p in params.items() if n not in case.excluded]}, without]
    groups = [g for g in groups if g["params"]]
    if case.optimizer == "lars":
        return Lars(groups, lr=1.0, **s)
    without["adapt"] = s["always_adapt"]
    return Lamb(groups, betas=(s["beta1"], s["beta2"]), eps=s["epsilon"], weight_decay=s["weight_decay"])
