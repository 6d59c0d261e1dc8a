"""Patterns such as "bias" or "batch_norm": which parameters a model has for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.optim import Optimizer

from fleetx import paddle_parameters
from fleetx.structure import plain_name


def problems(part: str, model: nn.Module, patterns: Sequence[str]) -> Iterator[str]:
    known = paddle_parameters.names(model)
    for pattern in patterns:
        if not pattern:
            yield f"{part}: an empty string in exclude_from_weight_decay would exclude every parameter: leave it out"
        elif not any(pattern in name for names in known.values() for name in names):
            some = [" = ".join(names) for names in known.values()]
            shown = "; ".join([*some[:2], *some[-1:]] if len(some) > 3 else some)
            yield (
                f"{part}: {pattern!r} in exclude_from_weight_decay is part of no parameter's name, so it would exclude "
                f"nothing. The names are: {shown}" + (" ..." if len(some) > 3 else "")
            )


def positions(model: nn.Module, optimizer: Optimizer, patterns: Sequence[str]) -> list[list[int]]:
    """For each group of the optimizer, where in it the excluded parameters are."""
    known = paddle_parameters.names(model)
    excluded = {
        p
        for name, p in model.named_parameters()
        if any(pattern in alias for alias in known[plain_name(name)] for pattern in patterns)
    }
    return [[i for i, p in enumerate(group["params"]) if p in excluded] for group in optimizer.param_groups]
