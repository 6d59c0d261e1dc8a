"""What Lars and Lamb share: checks, the step around the formula, and taking the place of a plain optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

Group = dict[str, Any]


class Layerwise(Optimizer):
    """An optimizer that scales the rate of each tensor by its norms.

    A group's `excluded` are the positions of those of its parameters that get neither decay nor scaling. Groups are
    not split for this: schedulers, and whatever else counts groups, see those that the user made.
    """

    own: ClassVar[tuple[str, ...]]  # the options of a group that the plain optimizer has not, and `weight_decay`
    declared: list[Group] | None = None  # the same by group, where a strategy decides them and not a checkpoint

    def __init__(self, params: Any, defaults: Group, *, exclude: Sequence[str], differentiable: bool):
        if differentiable:
            raise ValueError(f"{type(self).__name__} cannot be differentiated through: use differentiable=False")
        super().__init__(params, defaults | {"excluded": []})
        if exclude:
            self._exclude(exclude)

    def _exclude(self, patterns: Sequence[str]) -> None:
        if not all("param_names" in group for group in self.param_groups):
            raise ValueError("exclude_from_weight_decay needs names: pass model.named_parameters()")
        names = [name for group in self.param_groups for name in group["param_names"]]
        for pattern in patterns:
            if not any(pattern in name for name in names):
                raise ValueError(f"exclude_from_weight_decay: {pattern!r} is in no name of a parameter")
        for group in self.param_groups:
            group["excluded"] = [
                i for i, name in enumerate(group["param_names"]) if any(pattern in name for pattern in patterns)
            ]

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self.check(group)
            for p in group["params"]:
                if not p.is_floating_point():
                    raise ValueError(f"{type(self).__name__} takes real floating-point parameters, not {p.dtype}")
        except ValueError:
            self.param_groups.pop()
            raise

    @staticmethod
    def check(group: Group) -> None:
        """Raise ValueError where an option of a group is out of its bounds."""
        raise NotImplementedError

    def update(self, group: Group, chosen: list[int]) -> None:
        """One update of the parameters of a group that have a gradient; `chosen` are their positions."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        chosen = [[i for i, p in enumerate(group["params"]) if p.grad is not None] for group in self.param_groups]
        for group, positions in zip(self.param_groups, chosen, strict=True):  # before anything is changed
            for i in positions:
                if group["params"][i].grad.layout is not torch.strided:
                    raise RuntimeError(
                        f"{type(self).__name__} does not take sparse gradients (one has the shape "
                        f"{tuple(group['params'][i].shape)}): make the embedding with sparse=False"
                    )
        for group, positions in zip(self.param_groups, chosen, strict=True):
            if positions:
                self.update(group, positions)
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As torch's; what a strategy declared stays as declared, whatever the checkpoint says."""
        if self.declared is None:
            missing = [key for key in self.own if any(key not in group for group in state_dict["param_groups"])]
            if missing:
                raise ValueError(f"this is no checkpoint of {type(self).__name__}: its groups lack {missing}")
        super().load_state_dict(dict(state_dict))
        for group, declared in zip(self.param_groups, self.declared or (), strict=False):
            group.update(declared)


def adopt(optimizer: Optimizer, kind: type[Layerwise], options: Iterable[Group]) -> Layerwise:
    """Make the very same object a `kind`, with its groups, rates and state: whoever holds it holds the new one.

    A new object would leave the old one behind in the hands of schedulers and of scripts that do not look at what
    `fleet.distribute` returns, and these would go on with the plain optimizer without a word. `options` are the `own`
    options of each group.
    """
    made: Any = become(optimizer, kind)
    made.declared = list(options)
    for group, own in zip(made.param_groups, made.declared, strict=True):
        group.update(own)
        for gone in ("dampening", "amsgrad", "capturable", "differentiable", "decoupled_weight_decay"):
            group.pop(gone, None)
        kind.check(group)
    made.defaults = {k: v for k, v in made.param_groups[0].items() if k not in ("params", "param_names", "initial_lr")}
    made.defaults["excluded"] = []
    return made


def become(optimizer: Optimizer, kind: type[Optimizer]) -> Any:
    """The same object with another step()."""
    tracked = getattr(vars(optimizer).pop("step", None), "_wrapped_by_lr_sched", False)
    optimizer.__class__ = kind
    optimizer._patch_step_function()  # torch's own wrapper of step(), for a class that may never have been made
    if tracked:
        _track(optimizer)
    return optimizer


def _track(optimizer: Any) -> None:
    """A scheduler that was made before had wrapped the old step(), to see that it is called: wrap the new one."""
    call = type(optimizer).step

    @wraps(call)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return call(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step


def wide(dtype: torch.dtype) -> torch.dtype:
    """What is accumulated is kept in fp32 at least: in bf16 a second moment would stop moving at 1 / 256 of itself."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def gradients(params: list[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def accumulated(state: dict[str, Any], name: str, p: Tensor) -> Tensor:
    """The accumulator of this name, made or widened where it must be."""
    found = state.get(name)
    if found is None:
        found = state[name] = torch.zeros_like(p, dtype=wide(p.dtype), memory_format=torch.preserve_format)
    elif found.dtype is not wide(p.dtype):
        found = state[name] = found.to(wide(p.dtype))
    return found


def check_number(group: Group, name: str, *, below: float | None = None) -> None:
    value = float(group[name])
    if not (0.0 <= value < (float("inf") if below is None else below)):
        bound = "finite and not negative" if below is None else f"in [0, {below:g})"
        raise ValueError(f"{name} must be {bound}, not {value}")
