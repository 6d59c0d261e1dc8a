"""LARS (You, Gitman and Ginsburg 2017), with the same formula as Paddle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from fleetx.optim.dispatch import kernel_calls
from fleetx.optim.foreach import LarsStep
from fleetx.optim.layerwise import Layerwise, ParamGroup, accumulated, check_number, gradients, sgd_update


class Lars(Layerwise):
    """Momentum SGD that scales the learning rate of each tensor by the ratio of its norm to its gradient's.

        local = lr * lars_coeff * |p| / (|g| + weight_decay * |p| + epsilon)    where weight_decay, |p| and |g| are > 0
        local = lr                                                              otherwise
        d = local * (g + weight_decay * p)
        v = momentum * v + d
        p = p - v                                                               nesterov: p - (d + momentum * v)

    The rate is part of the velocity, so changing it does not rescale earlier steps. Without decay, in a group or for
    parameters in `exclude_from_weight_decay`, this is plain momentum. `lars_coeff=None` turns scaling off and equals
    torch.optim.SGD, bit for bit.
    """

    needs: ClassVar[tuple[str, ...]] = ("lr", "momentum")
    own: ClassVar[tuple[str, ...]] = ("weight_decay", "lars_coeff", "epsilon", "excluded")
    continues: ClassVar[tuple[str, ...]] = ("SGD",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        momentum: float = 0.9,
        *,
        lars_coeff: float | None = 0.001,
        weight_decay: float = 5e-4,
        epsilon: float = 0.0,
        nesterov: bool = False,
        maximize: bool = False,
        exclude_from_weight_decay: Sequence[str] = (),
        differentiable: bool = False,
    ):
        defaults = {
            "lr": lr, "momentum": momentum, "lars_coeff": lars_coeff, "weight_decay": weight_decay, "epsilon": epsilon,
            "nesterov": nesterov, "maximize": maximize, "dampening": 0.0,
        }  # fmt: skip
        super().__init__(params, defaults, exclude=exclude_from_weight_decay, differentiable=differentiable)

    @staticmethod
    def check(group: ParamGroup) -> None:
        for name in ("lr", "weight_decay", "epsilon"):
            check_number(group, name)
        check_number(group, "momentum", below=1.0)
        if group["lars_coeff"] is not None:
            check_number(group, "lars_coeff")
            if group["lars_coeff"] == 0:
                raise ValueError("lars_coeff=0 would stop training: use lars_coeff=None to turn scaling off")
        if group["nesterov"] and not group["momentum"]:
            raise ValueError("nesterov needs momentum above 0")
        if group.get("dampening"):
            raise ValueError("dampening is not supported: leave it at 0")

    def update(self, group: ParamGroup, params: list[Tensor], excluded: list[bool]) -> None:
        decays = [0.0 if skip else float(group["weight_decay"]) for skip in excluded]
        if group["lars_coeff"] is None:
            return self._sgd(group, params, decays)
        lr = float(group["lr"])
        if lr == 0 and any("momentum_buffer" in self.state.get(p, {}) for p in params):
            return self._decay_momentum(group, params)
        velocities = [self._velocity(p, lr) for p in params]
        coeff, epsilon = float(group["lars_coeff"]), float(group["epsilon"])

        def ratio(p: float, g: float, decay: float) -> float:
            return coeff * p / (g + decay * p + epsilon)

        adapted = [decay > 0 for decay in decays]
        for call in kernel_calls(params, gradients(params), velocities):
            step = LarsStep(
                lr, coeff, call.pick(decays), epsilon, float(group["momentum"]), group["nesterov"], group["maximize"]
            )
            call.kernels.lars(*call.tensors, step, self._noted(call, params, decays, adapted, ratio))

    def _decay_momentum(self, group: ParamGroup, params: list[Tensor]) -> None:
        """A step with lr = 0, where SGD's momentum buffer cannot be converted to a velocity yet."""
        for p in params:
            for name in ("momentum_buffer", "velocity"):
                if name in self.state.get(p, {}):
                    self.state[p][name].mul_(group["momentum"])

    def _velocity(self, p: Tensor, lr: float) -> Tensor:
        """The velocity, which includes the rate; SGD's momentum buffer, which does not, is converted."""
        state = self.state[p]
        if "velocity" not in state and (buffer := state.pop("momentum_buffer", None)) is not None:
            state["velocity"] = buffer * lr
        return accumulated(state, "velocity", p)

    def _sgd(self, group: ParamGroup, params: list[Tensor], decays: list[float]) -> None:
        for decay in dict.fromkeys(decays):
            chosen = [p for p, d in zip(params, decays, strict=True) if d == decay]
            for p in chosen:
                self._convert_velocity(p, float(group["lr"]))
            sgd_update(self, group, chosen, group["momentum"], decay)

    def _convert_velocity(self, p: Tensor, lr: float) -> None:
        """Convert the velocity to SGD's momentum buffer, which does not include the rate."""
        state = self.state.get(p, {})
        if lr and "momentum_buffer" not in state and (velocity := state.pop("velocity", None)) is not None:
            state["momentum_buffer"] = (velocity / lr).to(p.dtype)
