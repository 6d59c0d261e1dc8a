"""LARS, as in You, Gitman and Ginsburg 2017 and in Paddle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor
from torch.optim.sgd import sgd

from fleetx.optim.dispatch import paths
from fleetx.optim.layerwise import Group, Layerwise, accumulated, check_number, gradients


class Lars(Layerwise):
    """Momentum whose rate is scaled for each tensor by how large it is beside its gradient.

        local = lr * lars_coeff * |p| / (|g| + weight_decay * |p| + epsilon)    where weight_decay, |p| and |g| are > 0
        local = lr                                                              elsewhere
        d = local * (g + weight_decay * p)
        v = momentum * v + d
        p = p - v                                                               nesterov: p - (d + momentum * v)

    The rate is inside of the velocity, so a change of the rate does not rescale steps that were taken before. A group
    (or a parameter named by `exclude_from_weight_decay`) without decay gets plain momentum. `lars_coeff=None` turns the
    scaling off: then this is torch.optim.SGD, bit for bit.
    """

    needs: ClassVar[tuple[str, ...]] = ("lr", "momentum")
    own: ClassVar[tuple[str, ...]] = ("weight_decay", "lars_coeff", "epsilon", "excluded")

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
    def check(group: Group) -> None:
        for name in ("lr", "weight_decay", "epsilon"):
            check_number(group, name)
        check_number(group, "momentum", below=1.0)
        if group["lars_coeff"] is not None:
            check_number(group, "lars_coeff")
            if group["lars_coeff"] == 0:
                raise ValueError("lars_coeff=0 would stop the training; lars_coeff=None turns the scaling off")
        if group["nesterov"] and not group["momentum"]:
            raise ValueError("nesterov needs a momentum")
        if group.get("dampening"):
            raise ValueError("Lars has no dampening")

    def update(self, group: Group, chosen: list[int]) -> None:
        params = [group["params"][i] for i in chosen]
        excluded = set(group["excluded"])
        decays = [0.0 if i in excluded else float(group["weight_decay"]) for i in chosen]
        if group["lars_coeff"] is None:
            return self._plain(group, params, decays)
        lr = float(group["lr"])
        if lr == 0 and any("momentum_buffer" in self.state.get(p, {}) for p in params):
            return self._wait(group, params)
        velocities = [self._velocity(p, lr) for p in params]
        for path in paths(params, gradients(params), velocities):
            path.kernels.lars(
                *path.tensors,
                lr=lr,
                coeff=float(group["lars_coeff"]),
                decays=path.pick(decays),
                epsilon=float(group["epsilon"]),
                momentum=float(group["momentum"]),
                nesterov=group["nesterov"],
                maximize=group["maximize"],
                reduce=path.reduce,
            )

    def _wait(self, group: Group, params: list[Tensor]) -> None:
        """At a rate of 0 what SGD has gathered cannot be taken over yet, and nothing moves."""
        for p in params:
            for gathered in ("momentum_buffer", "velocity"):
                if gathered in self.state.get(p, {}):
                    self.state[p][gathered].mul_(group["momentum"])

    def _velocity(self, p: Tensor, lr: float) -> Tensor:
        """In units of the step, where SGD's buffer is in units of the gradient: what SGD has gathered is taken over."""
        state = self.state[p]
        if "velocity" not in state and (buffer := state.pop("momentum_buffer", None)) is not None:
            state["velocity"] = buffer * lr
        return accumulated(state, "velocity", p)

    def _plain(self, group: Group, params: list[Tensor], decays: list[float]) -> None:
        for decay in dict.fromkeys(decays):
            some = [p for p, d in zip(params, decays, strict=True) if d == decay]
            buffers = [self._buffer(p, float(group["lr"])) for p in some]
            sgd(
                some, gradients(some), buffers, foreach=group.get("foreach"), fused=group.get("fused"),
                weight_decay=decay, momentum=group["momentum"], lr=group["lr"], dampening=0.0,
                nesterov=group["nesterov"], maximize=group["maximize"],
            )  # fmt: skip
            if group["momentum"]:
                for p, buffer in zip(some, buffers, strict=True):
                    self.state[p]["momentum_buffer"] = buffer

    def _buffer(self, p: Tensor, lr: float) -> Tensor | None:
        state = self.state.get(p, {})
        if lr and "momentum_buffer" not in state and (velocity := state.pop("velocity", None)) is not None:
            state["momentum_buffer"] = (velocity / lr).to(p.dtype)
        return state.get("momentum_buffer")
