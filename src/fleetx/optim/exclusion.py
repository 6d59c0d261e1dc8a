"""Patterns such as "bias" or "batch_norm": which parameters a model has for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base.module_names import plain_name
from fleetx.optim import parameter_names


def problems(part: str, model: nn.Module, optimizer: Optimizer, patterns: Sequence[str]) -> Iterator[str]:
    known = parameter_names.names(model)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for pattern in patterns:
        if not pattern:
            yield f"{part}: an empty string in exclude_from_weight_decay would exclude every parameter: leave it out"
        elif not (found := _matching(model, pattern)):
            some = [" = ".join(names) for names in known.values()]
            shown = "; ".join([*some[:2], *some[-1:]] if len(some) > 3 else some)
            yield (
                f"{part}: {pattern!r} in exclude_from_weight_decay is part of no parameter's name, so it would exclude "
                f"nothing. The names are: {shown}" + (" ..." if len(some) > 3 else "")
            )
        elif not any(id(p) in held for p in found):
            yield (
                f"{part}: {pattern!r} in exclude_from_weight_decay is part only of names of parameters that the "
                "optimizer does not hold, so it would exclude nothing"
            )


def positions(model: nn.Module, patterns: Sequence[str], params: Sequence[Tensor]) -> list[int]:
    """Where in a group of parameters the excluded ones are."""
    excluded = {id(p) for pattern in patterns for p in _matching(model, pattern)}
    return [i for i, p in enumerate(params) if id(p) in excluded]


def _matching(model: nn.Module, pattern: str) -> list[Tensor]:
    """By torch's names, those of tied weights included; by Paddle's where no name of torch has the pattern.

    Not by both at once: "fc", meant for the layer `model.fc`, is in Paddle's name of every linear layer.
    """
    named: list[tuple[str, Tensor]] = [
        (plain_name(name), p) for name, p in model.named_parameters(remove_duplicate=False)
    ]
    if found := [p for name, p in named if pattern in name]:
        return found
    known = parameter_names.names(model)
    return [p for name, p in named if any(pattern in alias for alias in known.get(name, ()))]
