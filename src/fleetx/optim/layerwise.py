"""What Lars and Lamb share: checks, the step around the formula, and taking the place of a plain optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
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
    needs: ClassVar[tuple[str, ...]]  # those of the plain optimizer without which there is no update
    # Where a strategy decides the `own` options, and not whoever makes a group or a checkpoint: how it finds them.
    decide: Callable[[Group], Group] | None = None
    declared: list[Group] | None = None  # what it found, group by group
    _patterns: Sequence[str] = ()  # of names that are excluded, where no strategy decides

    def __init__(self, params: Any, defaults: Group, *, exclude: Sequence[str], differentiable: bool):
        if differentiable:
            raise ValueError(f"{type(self).__name__} cannot be differentiated through: use differentiable=False")
        if isinstance(exclude, str) or not all(isinstance(p, str) and p for p in exclude):
            raise ValueError(f"exclude_from_weight_decay takes a list of parts of names, not {exclude!r}")
        self._patterns = list(exclude)
        super().__init__(params, defaults)
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        for pattern in exclude:
            if not any(pattern in name for name in names):
                raise ValueError(f"exclude_from_weight_decay: {pattern!r} is in no name of a parameter")

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._complete(group)
            self.check(group)
            for p in group["params"]:
                if not p.is_floating_point():
                    raise ValueError(f"{type(self).__name__} takes real floating-point parameters, not {p.dtype}")
        except ValueError:
            self.param_groups.pop()
            raise

    def _complete(self, group: Group) -> None:
        """Find out which parameters of a new group are excluded."""
        if "exclude_from_weight_decay" in group:
            raise ValueError("exclude_from_weight_decay is no option of a group: pass it to the optimizer")
        if self.decide is not None and self.declared is not None:
            self.declared.append(self.decide(group))
            group.update(self.declared[-1])
        elif self._patterns and "param_names" not in group:
            raise ValueError("exclude_from_weight_decay needs names: pass model.named_parameters()")
        elif "excluded" not in group:
            named = enumerate(group.get("param_names", ()))
            group["excluded"] = [i for i, name in named if any(pattern in name for pattern in self._patterns)]

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
        needed = self.needs if self.declared is not None else (*self.needs, *self.own)
        if missing := [key for key in needed if any(key not in group for group in state_dict["param_groups"])]:
            raise ValueError(f"this is no checkpoint for {type(self).__name__}: its groups lack {', '.join(missing)}")
        for option in ("dampening", "amsgrad"):
            if any(group.get(option) for group in state_dict["param_groups"]):
                raise ValueError(f"the checkpoint was trained with {option}, which {type(self).__name__} has not")
        super().load_state_dict(dict(state_dict))
        for group in self.param_groups:  # which older checkpoints lack
            group.setdefault("maximize", False)
            group.setdefault("nesterov", False)
        for group, own in zip(self.param_groups, self.declared or (), strict=False):
            group.update(own)
        self._widen(state_dict)

    def _widen(self, state_dict: Mapping[str, Any]) -> None:
        """torch rounds what it loads to the dtype of the parameter; what is accumulated for 16 bits has 32."""
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(ids, params, strict=True):
            for name, value in state_dict["state"].get(i, {}).items():
                wider = isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not p.dtype
                if wider and name != "step":
                    self.state[p][name] = value.detach().clone().to(p.device)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"declared": self.declared, "_patterns": self._patterns}


def adopt(optimizer: Optimizer, kind: type[Layerwise], decide: Callable[[Group], Group]) -> Layerwise:
    """Make the very same object a `kind`, with its groups, rates and state: whoever holds it holds the new one.

    A new object would leave the old one behind in the hands of schedulers and of scripts that do not look at what
    `fleet.distribute` returns, and these would go on with the plain optimizer without a word. `decide` finds the `own`
    options of a group.
    """
    made: Any = become(optimizer, kind)
    made.decide = decide
    made.declared = [decide(group) for group in made.param_groups]
    for group, own in zip(made.param_groups, made.declared, strict=True):
        group.update(own)
    return made


def become(optimizer: Optimizer, kind: type[Optimizer]) -> Any:
    """The same object with another step()."""
    tracked = getattr(vars(optimizer).pop("step", None), "_wrapped_by_lr_sched", False)
    vars(optimizer).pop("_step_supports_amp_scaling", None)  # of a fused one, which would unscale by itself
    optimizer.__class__ = kind
    optimizer._patch_step_function()  # torch's own wrapper of step(), for a class that may never have been made
    if tracked:
        _track(optimizer)
    return optimizer


def _track(optimizer: Any) -> None:
    """A scheduler that was made before had wrapped the old step(), to see that it is called: wrap the new one."""
    call, itself = type(optimizer).step, weakref.ref(optimizer)  # weakly, or it would keep itself alive

    @wraps(call)
    def step(*args: Any, **kwargs: Any) -> Any:
        made: Any = itself()
        made._opt_called = True
        return call(made, *args, **kwargs)

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
    elif found.shape != p.shape:
        raise RuntimeError(
            f"the optimizer's {name} has the shape {tuple(found.shape)} and its parameter {tuple(p.shape)}: is the "
            "checkpoint of another model, or was the parameter resized?"
        )
    elif found.dtype is not wide(p.dtype):
        found = state[name] = found.to(wide(p.dtype))
    return found


def check_number(group: Group, name: str, *, below: float | None = None) -> None:
    value = float(group[name])
    if not (0.0 <= value < (float("inf") if below is None else below)):
        bound = "finite and not negative" if below is None else f"in [0, {below:g})"
        raise ValueError(f"{name} must be {bound}, not {value}")
