"""AdamW for the parameters that a layer-wise optimizer leaves to it: the same bits as from torch.optim.AdamW."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from fleetx.optim.layerwise import Group, gradients


def adamw_update(optimizer: Optimizer, group: Group, params: list[Tensor], decays: list[float]) -> None:
    beta1, beta2 = group["betas"]
    for p in params:
        _complete(optimizer.state[p], p, fused=bool(group.get("fused")))
    for decay in dict.fromkeys(decays):
        chosen = [p for p, d in zip(params, decays, strict=True) if d == decay]
        states = [optimizer.state[p] for p in chosen]
        adamw(
            chosen, gradients(chosen), [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states], [],
            [s["step"] for s in states], foreach=group.get("foreach"), fused=group.get("fused"), amsgrad=False,
            beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=decay, eps=group["eps"],
            maximize=group["maximize"],
        )  # fmt: skip


def _complete(state: dict[str, Any], p: Tensor, *, fused: bool) -> None:
    if "step" not in state:
        state["step"] = torch.tensor(0.0, dtype=torch.float32, device=p.device if fused else None)
    for name in ("exp_avg", "exp_avg_sq"):
        if name not in state:
            state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        elif state[name].dtype is not p.dtype:
            state[name] = state[name].to(p.dtype)
