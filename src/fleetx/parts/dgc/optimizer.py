"""SGD for gradients that may already include momentum and weight decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD
from torch.optim.sgd import sgd


class MomentumInGrad(SGD):
    """SGD, except that p <- p - lr * g where `in_grad(p)`: the gradient already includes momentum and weight decay."""

    in_grad: Callable[[Tensor], bool] | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            split: dict[bool, list[Tensor]] = {False: [], True: []}
            for p in group["params"]:
                if p.grad is not None:
                    split[self.in_grad is not None and self.in_grad(p)].append(p)
            self._update(group, split[False], group["momentum"], group["weight_decay"])
            self._update(group, split[True], 0.0, 0.0)
        return loss

    def _update(self, group: dict[str, Any], params: list[Tensor], momentum: float, decay: float) -> None:
        if not params:
            return
        buffers = [self.state[p].get("momentum_buffer") if momentum else None for p in params]
        sgd(
            params, [p.grad for p in params if p.grad is not None], buffers, foreach=group["foreach"],
            fused=group["fused"], weight_decay=decay, momentum=momentum, lr=group["lr"],
            dampening=group["dampening"], nesterov=group["nesterov"], maximize=group["maximize"],
        )  # fmt: skip
        if momentum:
            for p, buffer in zip(params, buffers, strict=True):
                self.state[p]["momentum_buffer"] = buffer
