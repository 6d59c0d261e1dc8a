"""Which parameters of a model match patterns such as "bias" or "batch_norm"."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base.module_names import plain_name
from fleetx.optim import parameter_names


def problems(part: str, model: nn.Module, optimizer: Optimizer, patterns: Sequence[str]) -> Iterator[str]:
    """Patterns that would exclude nothing, or everything."""
    known = parameter_names.names(model)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for pattern in patterns:
        if not pattern:
            yield f"{part}: an empty string in exclude_from_weight_decay would exclude every parameter: remove it"
        elif not (matching := _matching(model, pattern)):
            names = [" = ".join(aliases) for aliases in known.values()]
            shown = "; ".join([*names[:2], *names[-1:]] if len(names) > 3 else names)
            yield (
                f"{part}: {pattern!r} in exclude_from_weight_decay matches no parameter name, so it would exclude "
                f"nothing. The names are: {shown}" + (" ..." if len(names) > 3 else "")
            )
        elif not any(id(p) in held for p in matching):
            yield (
                f"{part}: {pattern!r} in exclude_from_weight_decay only matches parameters that are not in the "
                "optimizer, so it would exclude nothing: remove it"
            )


def positions(model: nn.Module, patterns: Sequence[str], params: Sequence[Tensor]) -> list[int]:
    """The positions in `params` of the parameters that match a pattern."""
    excluded = {id(p) for pattern in patterns for p in _matching(model, pattern)}
    return [i for i, p in enumerate(params) if id(p) in excluded]


def _matching(model: nn.Module, pattern: str) -> list[Tensor]:
    """The parameters with a matching torch name (tied weights have several), or else with a matching Paddle name.

    Not both, because "fc", meant for the layer `model.fc`, is part of Paddle's name for every linear layer.
    """
    named: list[tuple[str, Tensor]] = [
        (plain_name(name), p) for name, p in model.named_parameters(remove_duplicate=False)
    ]
    if matching := [p for name, p in named if pattern in name]:
        return matching
    known = parameter_names.names(model)
    return [p for name, p in named if any(pattern in alias for alias in known.get(name, ()))]
