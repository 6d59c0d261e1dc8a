"""LAMB, as in You et al. 2020 with the bias correction of Adam, and as in today's Paddle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from fleetx.optim.dispatch import paths
from fleetx.optim.layerwise import Group, Layerwise, accumulated, check_number, gradients


class Lamb(Layerwise):
    """Adam whose step is scaled for each tensor to its length.

        m = b1 * m + (1 - b1) * g,   v = b2 * v + (1 - b2) * g * g
        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * p
        p = p - lr * r * u,   r = |p| / |u|, or 1 where one of them is 0

    A parameter named by `exclude_from_weight_decay` has no decay and r = 1; `always_adapt` gives it its ratio back. A
    group with `adapt=False` is torch.optim.AdamW, bit for bit.
    """

    needs: ClassVar[tuple[str, ...]] = ("lr", "betas", "eps")
    own: ClassVar[tuple[str, ...]] = ("weight_decay", "adapt", "always_adapt", "excluded")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        adapt: bool = True,
        always_adapt: bool = False,
        maximize: bool = False,
        exclude_from_weight_decay: Sequence[str] = (),
        differentiable: bool = False,
    ):
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt,
            "always_adapt": always_adapt, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults, exclude=exclude_from_weight_decay, differentiable=differentiable)

    @staticmethod
    def check(group: Group) -> None:
        for name in ("lr", "eps", "weight_decay"):
            check_number(group, name)
        if not group["eps"] > 0:
            raise ValueError("eps must be above 0: without it a gradient of 0 divides by 0")
        if len(group["betas"]) != 2:
            raise ValueError(f"betas must be two numbers, not {group['betas']}")
        for i, beta in enumerate(group["betas"]):
            check_number({f"betas[{i}]": beta}, f"betas[{i}]", below=1.0)

    def update(self, group: Group, chosen: list[int]) -> None:
        params = [group["params"][i] for i in chosen]
        excluded = set(group["excluded"])
        decays = [0.0 if i in excluded else float(group["weight_decay"]) for i in chosen]
        adapts = [i not in excluded or group["always_adapt"] for i in chosen]
        if not group["adapt"]:
            return self._plain(group, params, decays)
        steps = [self._step(p) for p in params]
        torch._foreach_add_(steps, 1.0)
        firsts = [accumulated(self.state[p], "exp_avg", p) for p in params]
        seconds = [accumulated(self.state[p], "exp_avg_sq", p) for p in params]
        numbers = [step.item() for step in steps]
        beta1, beta2 = group["betas"]
        for path in paths(params, gradients(params), firsts, seconds):
            path.kernels.lamb(
                *path.tensors,
                lr=float(group["lr"]),
                beta1=float(beta1),
                beta2=float(beta2),
                epsilon=float(group["eps"]),
                decays=path.pick(decays),
                adapts=path.pick(adapts),
                steps=path.pick(numbers),
                maximize=group["maximize"],
                reduce=path.reduce,
            )

    def _step(self, p: Tensor) -> Tensor:
        """A tensor on the host, as torch's Adam keeps it, so that a state of either is one of the other."""
        state = self.state[p]
        if not isinstance(state.get("step"), Tensor):  # a number in checkpoints of the past
            state["step"] = torch.tensor(float(state.get("step", 0)), dtype=torch.float32)
        elif state["step"].device.type != "cpu":  # of a fused Adam
            state["step"] = state["step"].cpu()
        return state["step"]

    def _plain(self, group: Group, params: list[Tensor], decays: list[float]) -> None:
        beta1, beta2 = group["betas"]
        for p in params:
            state = self.state[p]
            if "step" not in state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32, device=p.device if group.get("fused") else None)
            for name in ("exp_avg", "exp_avg_sq"):
                if name not in state:
                    state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
                elif state[name].dtype is not p.dtype:
                    state[name] = state[name].to(p.dtype)
        for decay in dict.fromkeys(decays):
            some = [p for p, d in zip(params, decays, strict=True) if d == decay]
            adamw(
                some, gradients(some), [self.state[p]["exp_avg"] for p in some],
                [self.state[p]["exp_avg_sq"] for p in some], [], [self.state[p]["step"] for p in some],
                foreach=group.get("foreach"), fused=group.get("fused"), amsgrad=False, beta1=beta1, beta2=beta2,
                lr=group["lr"], weight_decay=decay, eps=group["eps"], maximize=group["maximize"],
            )  # fmt: skip
