"""SGD for gradients of which some carry their momentum and decay already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD
from torch.optim.sgd import sgd


class CarriedMomentum(SGD):
    """As SGD, but p <- p - lr * g for each parameter that `carries` tells of."""

    carries: Callable[[Tensor], bool] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            present = [p for p in group["params"] if p.grad is not None]
            for carried in (False, True):
                self._update(group, [p for p in present if bool(self.carries and self.carries(p)) is carried], carried)
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor], carried: bool) -> None:
        if not params:
            return
        momentum = 0.0 if carried else group["momentum"]
        buffers = [self.state[p].get("momentum_buffer") if momentum else None for p in params]
        sgd(
            params, [p.grad for p in params if p.grad is not None], buffers, foreach=group["foreach"],
            fused=group["fused"], weight_decay=0.0 if carried else group["weight_decay"], momentum=momentum,
            lr=group["lr"], dampening=group["dampening"], nesterov=group["nesterov"], maximize=group["maximize"],
        )  # fmt: skip
        if momentum:
            for p, buffer in zip(params, buffers, strict=True):
                self.state[p]["momentum_buffer"] = buffer
