"""The base class of Lars, Lamb and Muon: checks, excluded parameters, step() around the formula, checkpoints.

Also SGD and AdamW for the parameters that such an optimizer leaves to them: bit for bit like torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from fleetx.optim.dispatch import KernelCall
from fleetx.optim.foreach import AllSum

ParamGroup = dict[str, Any]
RatioFormula = Callable[[float, float, float], float]  # the trust ratio, of |p|, |g| or |u|, and the decay


class Layerwise(Optimizer):
    """An optimizer whose step depends on each tensor as a whole: on its norm, or on its singular values.

    `group["excluded"]` has the positions of the parameters that get the update of a plain optimizer. They do not get
    groups of their own, because schedulers and other code rely on the user's groups.
    """

    own: ClassVar[tuple[str, ...]]  # options of a group that the plain optimizer does not have, and `weight_decay`
    needs: ClassVar[tuple[str, ...]]  # options of the plain optimizer that the update needs
    continues: ClassVar[tuple[str, ...]] = ()  # torch's optimizers whose state it takes over
    excludes: ClassVar[str] = "exclude_from_weight_decay"  # what the user calls the patterns of excluded names
    # Set under a strategy, which then decides the `own` options instead of the user and the checkpoint:
    decide: Callable[[ParamGroup], ParamGroup] | None = None  # returns them for a group
    declared: list[ParamGroup] | None = None  # what it returned, per group
    _patterns: Sequence[str] = ()  # names to exclude, without a strategy
    recorder: Any = None  # a TrustRatios, which records by what each tensor's rate is multiplied

    def __init__(self, params: Any, defaults: ParamGroup, *, exclude: Sequence[str], differentiable: bool):
        if differentiable:
            raise ValueError(f"{type(self).__name__} does not support differentiable=True: pass differentiable=False")
        if isinstance(exclude, str) or not all(isinstance(p, str) and p for p in exclude):
            raise ValueError(f"{self.excludes} must be a list of substrings of names, not {exclude!r}")
        self._patterns = list(exclude)
        super().__init__(params, defaults)
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        for pattern in exclude:
            if not any(pattern in name for name in names):
                raise ValueError(f"{self.excludes}: {pattern!r} matches no parameter name")

    def add_param_group(self, param_group: ParamGroup) -> None:
        chosen = {k: v for k, v in param_group.items() if k in self.own and k not in ("excluded", "adapt")}
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._complete(group, chosen)
            self.check(group)
            for p in group["params"]:
                if not p.is_floating_point():
                    raise ValueError(
                        f"{type(self).__name__} needs real floating-point parameters, not {p.dtype}: pass this one to "
                        "another optimizer"
                    )
        except ValueError:
            self.param_groups.pop()
            raise

    def _complete(self, group: ParamGroup, chosen: ParamGroup) -> None:
        """Set the `own` options of a new group, except those it came with. Without a strategy, only set `excluded`."""
        if self.excludes in group:
            raise ValueError(f"{self.excludes} is not an option of a group: pass it to the optimizer")
        if self.decide is not None and self.declared is not None:
            self.declared.append(self.decide(group) | chosen)
            group.update(self.declared[-1])
        elif self._patterns and "param_names" not in group:
            raise ValueError(f"{self.excludes} needs names: pass model.named_parameters()")
        elif "excluded" not in group:
            named = enumerate(group.get("param_names", ()))
            group["excluded"] = [i for i, name in named if any(pattern in name for pattern in self._patterns)]

    @staticmethod
    def check(group: ParamGroup) -> None:
        """Raise ValueError if an option of a group is out of range."""
        raise NotImplementedError

    def update(self, group: ParamGroup, params: list[Tensor], excluded: list[bool]) -> None:
        """Update the parameters of a group that have a gradient."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p in (p for group in self.param_groups for p in group["params"]):  # before anything changes
            if p.grad is not None and p.grad.layout is not torch.strided:
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients, and a parameter of shape "
                    f"{tuple(p.shape)} has one: create the embedding with sparse=False"
                )
        if self.recorder is not None:
            self.recorder.begin()
        for group in self.param_groups:
            chosen = [i for i, p in enumerate(group["params"]) if p.grad is not None]
            if chosen:
                excluded = set(group["excluded"])
                self.update(group, [group["params"][i] for i in chosen], [i in excluded for i in chosen])
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load as torch does, but keep the options that a strategy sets, whatever the checkpoint says."""
        self.check_saved(state_dict["param_groups"])
        super().load_state_dict(dict(state_dict))
        for group in self.param_groups:  # older checkpoints lack these
            group.setdefault("maximize", False)
            group.setdefault("nesterov", False)
        for group, own in zip(self.param_groups, self.declared or (), strict=False):
            group.update(own)
        self._widen(state_dict)

    def check_saved(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if the groups of a checkpoint lack options, or have one that this optimizer does not."""
        needed = self.needs if self.declared is not None else (*self.needs, *self.own)
        if missing := [key for key in needed if any(key not in group for group in groups)]:
            raise ValueError(f"not a checkpoint of {type(self).__name__}: its groups lack {', '.join(missing)}")
        for option in ("dampening", "amsgrad"):
            if any(group.get(option) for group in groups):
                raise ValueError(f"the checkpoint used {option}, which {type(self).__name__} does not support")

    def _noted(
        self, call: KernelCall, params: list[Tensor], decays: list[float], adapted: list[bool], formula: RatioFormula
    ) -> AllSum | None:
        """What a kernel calls with its squared norms."""
        if self.recorder is None:
            return call.reduce
        noting: AllSum = self.recorder.noting(call, params, decays, adapted, formula)
        return noting

    def _widen(self, state_dict: Mapping[str, Any]) -> None:
        """Restore fp32 state of 16-bit parameters, which torch rounds to the dtype of the parameter."""
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(ids, params, strict=True):
            for name, value in state_dict["state"].get(i, {}).items():
                wider = isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not p.dtype
                if wider and name != "step":
                    self.state[p][name] = value.detach().clone().to(p.device)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"declared": self.declared, "_patterns": self._patterns}


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of accumulators, fp32 or wider: in bf16 a second moment cannot change by less than 1/256 of itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def gradients(params: list[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def accumulated(state: dict[str, Any], name: str, p: Tensor) -> Tensor:
    """The accumulator of this name, created or widened if needed."""
    value = state.get(name)
    if value is None:
        value = state[name] = torch.zeros_like(p, dtype=wide(p.dtype), memory_format=torch.preserve_format)
    elif value.shape != p.shape:
        raise RuntimeError(
            f"the optimizer's {name} has shape {tuple(value.shape)}, but its parameter has {tuple(p.shape)}: the "
            "checkpoint belongs to another model, or the parameter was resized"
        )
    elif value.dtype is not wide(p.dtype):
        value = state[name] = value.to(wide(p.dtype))
    return value


def check_number(group: ParamGroup, name: str, *, below: float | None = None) -> None:
    value = float(group[name])
    if not (0.0 <= value < (float("inf") if below is None else below)):
        bound = "finite and at least 0" if below is None else f"in [0, {below:g})"
        raise ValueError(f"{name} must be {bound}, not {value}")


# --- plain updates --------------------------------------------------------------------------------
def sgd_update(optimizer: Optimizer, group: ParamGroup, params: list[Tensor], momentum: float, decay: float) -> None:
    buffers = [optimizer.state[p].get("momentum_buffer") if momentum else None for p in params]
    sgd(
        params, gradients(params), buffers, foreach=group.get("foreach"), fused=group.get("fused"), weight_decay=decay,
        momentum=momentum, lr=group["lr"], dampening=group.get("dampening", 0.0), nesterov=group["nesterov"],
        maximize=group["maximize"],
    )  # fmt: skip
    if momentum:
        for p, buffer in zip(params, buffers, strict=True):
            optimizer.state[p]["momentum_buffer"] = buffer


def adamw_update(optimizer: Optimizer, group: ParamGroup, params: list[Tensor], decays: list[float]) -> None:
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
