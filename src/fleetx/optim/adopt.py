"""Turn the user's optimizer into a Lars, Lamb or Muon, in place."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from torch.optim import Optimizer

from fleetx.base import seams
from fleetx.errors import NOT_BUILT
from fleetx.optim.layerwise import Layerwise, ParamGroup


def adoption_problems(
    part: str,
    optimizer: Optimizer,
    kinds: tuple[type[Optimizer], ...],
    wanted: str,
    target: type[Layerwise],
    own_options: Callable[[ParamGroup, list[int]], ParamGroup],
    *,
    decays: bool = True,
) -> Iterator[str]:
    """Why `optimizer` cannot become a `target`.

    kinds, wanted   the classes that can, and what to call them in a message
    own_options     the options that the part sets in a group, given the positions of excluded parameters
    decays          does the part have its own weight decay?
    """
    name, groups = type(optimizer).__name__, optimizer.param_groups
    if isinstance(optimizer, Layerwise):
        yield f"the optimizer is already a {name}: turn strategy.{part} off, or pass {wanted}"
        return  # the options of another optimizer do not matter
    if type(optimizer) not in kinds:  # a subclass may have its own step(), which would be lost
        yield f"{part} needs {wanted}, not {name}: pass one to fleet.distribute"
        return
    if decays and (own := max(group["weight_decay"] for group in groups)):
        decay = own_options(groups[0], [])["weight_decay"]
        yield (
            f"the optimizer has its own weight_decay ({own}), and {part} would "
            f"{'apply a second one' if decay else f'replace it with {decay:g}'}: pass weight_decay=0 to {name} and set "
            f"strategy.{part}_configs['{part}_weight_decay']"
        )
    yield from dict.fromkeys(f"{part}: {error}" for error in _errors(target, groups, own_options))
    if other := {p.dtype for group in groups for p in group["params"] if not p.is_floating_point()}:
        yield f"{part} needs real floating-point parameters, not {', '.join(map(str, other))}: turn {part} off"
    for option in ("differentiable", "capturable", "amsgrad"):
        if any(group.get(option) for group in groups):
            yield f"{part} with {option} {NOT_BUILT}: pass {option}=False"
    patched = vars(optimizer).get("step")
    if patched is not None and not hasattr(patched, seams.TRACKED):
        yield f"optimizer.step was patched, and {part} would undo that: patch it after fleet.distribute"


def _errors(
    target: type[Layerwise], groups: list[ParamGroup], own_options: Callable[[ParamGroup, list[int]], ParamGroup]
) -> Iterator[str]:
    for group in groups:
        try:
            target.check(group | {"dampening": 0} | own_options(group, []))  # the part says more about dampening
        except ValueError as error:
            yield str(error)


def adopt(optimizer: Optimizer, kind: type[Layerwise], decide: Callable[[ParamGroup], ParamGroup]) -> Layerwise:
    """Turn this very object into a `kind`; it keeps its groups and state. `decide` returns a group's `own` options.

    With a new object, schedulers and scripts that ignore the return value of `fleet.distribute` would silently keep
    using the plain optimizer.
    """
    adopted: Any = become(optimizer, kind)
    adopted.decide = decide
    adopted.declared = [decide(group) for group in adopted.param_groups]
    for group, own in zip(adopted.param_groups, adopted.declared, strict=True):
        group.update(own)
    return adopted


def become(optimizer: Optimizer, kind: type[Optimizer]) -> Any:
    """Change the class of an optimizer, and so its step()."""
    tracked = getattr(vars(optimizer).pop("step", None), seams.TRACKED, False)
    vars(optimizer).pop(seams.SCALES_ITSELF, None)  # fused optimizers unscale the gradients themselves
    optimizer.__class__ = kind
    seams.patch_step_function(optimizer)  # torch wraps step() when the first object of a class is made
    if tracked:
        _track(optimizer)
    return optimizer


def _track(optimizer: Any) -> None:
    """Record calls of step() for a scheduler that was created earlier: it had wrapped the old step() for this."""
    call, reference = type(optimizer).step, weakref.ref(optimizer)  # a strong reference would be a cycle

    @wraps(call)
    def step(*args: Any, **kwargs: Any) -> Any:
        adopted: Any = reference()
        setattr(adopted, seams.CALLED, True)
        return call(adopted, *args, **kwargs)

    setattr(step, seams.TRACKED, True)
    optimizer.step = step
