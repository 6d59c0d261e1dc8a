"""SGD for gradients that may already include momentum and weight decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from fleetx.optim.layerwise import sgd_update


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
            if split[False]:
                sgd_update(self, group, split[False], group["momentum"], group["weight_decay"])
            if split[True]:
                sgd_update(self, group, split[True], 0.0, 0.0)
        return loss
