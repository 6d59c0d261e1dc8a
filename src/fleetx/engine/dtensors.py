"""Parameters that are divided between ranks: DTensors, and the part of them that this rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fleetx.base.module_names import plain_name
from fleetx.errors import StrategyError


@cache
def _dtensor() -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor


def local(t: Tensor) -> Tensor:
    """What this rank holds of it, to be changed in place."""
    if type(t) in (Tensor, nn.Parameter) or not isinstance(t, _dtensor()):
        return t
    found: Tensor = t._local_tensor
    return found


def shard_of(p: Tensor, part: Tensor) -> Tensor:
    """What a rank holds, as a piece of a tensor that is divided as this parameter is."""
    if local(p) is p:
        return part
    whole: Any = p
    made: Tensor = _dtensor().from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    return made


def renamed(
    before: Mapping[nn.Parameter, str], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[nn.Parameter, str]:
    """The parameters of a model that may have others under the same names now; the optimizer is given these."""
    now = {p: plain_name(n) for n, p in model.named_parameters()}
    if list(before.values()) != list(now.values()):
        raise StrategyError("a MODEL act changed the names of parameters")
    replaced = dict(zip(before, now, strict=True))
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(p, p) for p in group["params"]]
    return now
