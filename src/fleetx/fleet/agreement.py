"""Checks that all ranks agree, before a difference can leave them waiting for each other in different places."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fleetx import __version__
from fleetx.base.module_names import plain_name
from fleetx.comm.world import World, listed
from fleetx.errors import StrategyError, UsageError, WorldError
from fleetx.strategy import DistributedStrategy

MOST = 4  # differences that a message lists


def check_strategy(strategy: DistributedStrategy, world: World) -> None:
    """Raise an error that names the ranks whose strategies differ. Costs one small collective if none do."""
    if different := _compared(_flat(strategy), world):
        same = "declare the same one on every rank"
        raise StrategyError([f"the ranks declare different strategies ({found}): {same}" for found in different])


def check_versions(checks: Any, world: World) -> None:
    """The same for the versions of fleetx and torch, and for what is checked during training."""
    mine = {"fleetx": __version__, "torch": torch.__version__, "checks": repr(checks)}
    mine["FLEETX_WATCH"] = os.environ.get("FLEETX_WATCH", "1")
    if different := _compared(mine, world):
        raise WorldError(
            f"the ranks run different programs: {'; '.join(different)}. Install the same versions and pass the same "
            "fleet.init(checks=...) everywhere; `fleetx doctor` compares hosts"
        )


def check_training(model: nn.Module, optimizer: Optimizer, world: World) -> None:
    """The same for names, shapes and types of the model's tensors, and for the optimizer and its settings."""
    if world.size == 1:
        return
    if different := _compared(_fingerprint(model, optimizer), world):
        more = f"; and {len(different) - MOST} more" if len(different) > MOST else ""
        raise UsageError(
            f"the ranks train different things: {'; '.join(different[:MOST])}{more}. They would drift apart or wait "
            "for each other: build the same model and the same optimizer on every rank"
        )


def _compared(mine: dict[str, Any], world: World) -> list[str]:
    """What differs between ranks. They compare hashes first, and send the values only if the hashes differ."""
    if world.size == 1:
        return []
    text = json.dumps(mine, sort_keys=True, default=repr)
    digest = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8, device=world.device)
    digests = world.gather(digest).tolist()
    if all(digest == digests[0] for digest in digests):
        return []
    return list(_differ(world.gather_json(json.loads(text))))


def _fingerprint(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    names = {p: plain_name(n) for n, p in model.named_parameters()}
    found: dict[str, Any] = {f"parameter {name}": _told(p) for p, name in names.items()}
    found |= {f"buffer {plain_name(name)}": _told(b) for name, b in model.named_buffers()}
    found["optimizer"] = type(optimizer).__name__
    for i, group in enumerate(optimizer.param_groups):
        settings = group | {"params": [names.get(p, "not in the model") for p in group["params"]]}
        found |= {f"param_groups[{i}][{key!r}]": _plain(value) for key, value in settings.items()}
    return found


def _told(t: Tensor) -> str:
    if is_lazy(t):
        return "not initialized"
    frozen = isinstance(t, nn.Parameter) and not t.requires_grad
    return f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}{' frozen' if frozen else ''}"


def _plain(value: Any) -> Any:
    """A setting of an optimizer, without addresses or anything else that differs between processes."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else _told(value)
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


def _flat(strategy: DistributedStrategy) -> dict[str, Any]:
    values = strategy._values()
    settings = {f"{name}[{k!r}]": v for name, some in values.items() if isinstance(some, dict) for k, v in some.items()}
    return {name: v for name, v in values.items() if not isinstance(v, dict)} | settings


def _differ(declared: list[dict[str, Any]]) -> Iterator[str]:
    for key in sorted({key for one in declared for key in one}):
        ranks: dict[str, list[int]] = {}
        for rank, one in enumerate(declared):
            ranks.setdefault(_shown(key, one), []).append(rank)
        if len(ranks) > 1:
            yield f"{key} = " + ", ".join(f"{value} on {listed(some)}" for value, some in ranks.items())


def _shown(key: str, one: dict[str, Any]) -> str:
    if key not in one:
        return "absent"
    return str(one[key]) if key.startswith(("parameter ", "buffer ", "optimizer")) else repr(one[key])
