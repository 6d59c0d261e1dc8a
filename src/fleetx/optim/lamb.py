"""LAMB (You et al. 2020) with Adam's bias correction, as in current versions of Paddle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fleetx.base import seams
from fleetx.optim.dispatch import kernel_calls
from fleetx.optim.foreach import LambStep
from fleetx.optim.layerwise import Layerwise, ParamGroup, accumulated, adamw_update, check_number, gradients


class Lamb(Layerwise):
    """Adam that scales the step of each tensor to the norm of the tensor.

        m = b1 * m + (1 - b1) * g,   v = b2 * v + (1 - b2) * g * g
        u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + weight_decay * p
        p = p - lr * r * u,   r = |p| / |u|, or 1 if either is 0

    Parameters in `exclude_from_weight_decay` get no decay and r = 1; with `always_adapt`, they get no decay but keep r.
    A group with `adapt=False` is updated as by torch.optim.AdamW, bit for bit.
    """

    needs: ClassVar[tuple[str, ...]] = ("lr", "betas", "eps")
    own: ClassVar[tuple[str, ...]] = ("weight_decay", "adapt", "always_adapt", "excluded")
    continues: ClassVar[tuple[str, ...]] = ("Adam", "AdamW")

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
    def check(group: ParamGroup) -> None:
        for name in ("lr", "eps", "weight_decay"):
            check_number(group, name)
        if not group["eps"] > 0:
            raise ValueError("eps must be above 0, because a gradient of 0 would divide by it")
        if len(group["betas"]) != 2:
            raise ValueError(f"betas must be two numbers, not {group['betas']}")
        for i, beta in enumerate(group["betas"]):
            check_number({f"betas[{i}]": beta}, f"betas[{i}]", below=1.0)

    def update(self, group: ParamGroup, params: list[Tensor], excluded: list[bool]) -> None:
        decays = [0.0 if skip else float(group["weight_decay"]) for skip in excluded]
        adapts = [not skip or group["always_adapt"] for skip in excluded]
        if not group["adapt"]:
            return adamw_update(self, group, params, decays)
        steps = [self._step(p) for p in params]
        seams.foreach_add_(steps, 1.0)
        firsts = [accumulated(self.state[p], "exp_avg", p) for p in params]
        seconds = [accumulated(self.state[p], "exp_avg_sq", p) for p in params]
        numbers = [step.item() for step in steps]
        beta1, beta2 = group["betas"]
        for call in kernel_calls(params, gradients(params), firsts, seconds):
            step = LambStep(
                lr=float(group["lr"]),
                beta1=float(beta1),
                beta2=float(beta2),
                epsilon=float(group["eps"]),
                decays=call.pick(decays),
                adapts=call.pick(adapts),
                steps=call.pick(numbers),
                maximize=group["maximize"],
            )
            call.kernels.lamb(*call.tensors, step, self._noted(call, params, decays, adapts, lambda p, u, _: p / u))

    def _step(self, p: Tensor) -> Tensor:
        """The step counter: a CPU tensor, as in torch's Adam, so that each can load the other's state."""
        state = self.state[p]
        if not isinstance(state.get("step"), Tensor):  # old checkpoints have a number
            state["step"] = torch.tensor(float(state.get("step", 0)), dtype=torch.float32)
        elif state["step"].device.type != "cpu":  # from a fused Adam
            state["step"] = state["step"].cpu()
        return state["step"]
