"""What all ranks must agree on, checked before they wait for each other in different places."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import torch

from fleetx.comm.world import World, listed
from fleetx.errors import StrategyError
from fleetx.strategy import DistributedStrategy


def check_strategy(strategy: DistributedStrategy, world: World) -> None:
    """Raise an error that names the ranks whose strategies differ. One small collective if none does."""
    if world.size == 1:
        return
    text = json.dumps(_flat(strategy), sort_keys=True, default=repr)
    digest = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8, device=world.device)
    digests = world.gather(digest).tolist()
    if all(digest == digests[0] for digest in digests):
        return
    declared = world.gather_json(json.loads(text))
    raise StrategyError([f"the ranks declare different strategies: {difference}" for difference in _differ(declared)])


def _flat(strategy: DistributedStrategy) -> dict[str, Any]:
    values = strategy._values()
    settings = {f"{name}[{k!r}]": v for name, some in values.items() if isinstance(some, dict) for k, v in some.items()}
    return {name: v for name, v in values.items() if not isinstance(v, dict)} | settings


def _differ(declared: list[dict[str, Any]]) -> Iterator[str]:
    for key in sorted({key for one in declared for key in one}):
        ranks: dict[str, list[int]] = {}
        for rank, one in enumerate(declared):
            ranks.setdefault(repr(one.get(key)), []).append(rank)
        if len(ranks) > 1:
            yield f"{key} = " + ", ".join(f"{value} on {listed(some)}" for value, some in ranks.items())
