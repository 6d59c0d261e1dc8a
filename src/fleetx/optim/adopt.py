"""Which of the user's optimizers a strategy may turn into one of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.optim import Optimizer

from fleetx.optim import native
from fleetx.optim.layerwise import Group, Layerwise


def problems(
    part: str,
    optimizer: Optimizer,
    kinds: tuple[type[Optimizer], ...],
    wanted: str,
    decay: str,
    becomes: type[Layerwise],
    own: Callable[[Group, list[int]], Group],
) -> Iterator[str]:
    """`kinds` can become a `becomes`; `own` are the options that a group gets, given which parameters are excluded."""
    if isinstance(optimizer, Layerwise):
        yield f"the optimizer is a {type(optimizer).__name__} already: turn strategy.{part} off, or pass {wanted}"
    elif type(optimizer) not in kinds:  # not a subclass either: its own step() would be lost
        yield f"{part} is made of {wanted}, not of {type(optimizer).__name__}: pass that to fleet.distribute"
    groups = optimizer.param_groups
    if type(optimizer) in kinds and any(group["weight_decay"] for group in groups):
        yield (
            f"the optimizer has a weight_decay of its own ({max(group['weight_decay'] for group in groups)}), which "
            f"{part} would apply a second time: pass weight_decay=0 to {type(optimizer).__name__} and set "
            f"strategy.{part}_configs['{decay}']"
        )
    elif type(optimizer) in kinds:
        for group in groups:
            try:
                becomes.check(group | own(group, []))
            except ValueError as error:
                yield f"{part}: {error}"
        if odd := {p.dtype for group in groups for p in group["params"] if not p.is_floating_point()}:
            yield f"{part} takes real floating-point parameters, not {', '.join(map(str, odd))}"
    for option in ("differentiable", "capturable"):
        if any(group.get(option) for group in groups):
            yield f"{part} cannot be {option}: pass {option}=False to {type(optimizer).__name__}"
    patched = vars(optimizer).get("step")
    if patched is not None and not hasattr(patched, "_wrapped_by_lr_sched"):
        yield f"optimizer.step was replaced on this very optimizer, which {part} would undo: replace it afterwards"


def path() -> str:
    """How it is computed on the CPU, for `explain`."""
    why = native.reason()
    return f"on a CPU by stock torch kernels: {why}" if why else "on a CPU by the compiled kernels"
