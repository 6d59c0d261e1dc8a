"""What the ranks must agree on, found out before they wait for each other in different places."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fleetx.comm.world import World
from fleetx.errors import StrategyError, UsageError
from fleetx.strategy import DistributedStrategy


def check_strategy(strategy: DistributedStrategy, world: World) -> None:
    """One small collective; a second, larger one only where the ranks differ."""
    if world.size == 1:
        return
    text = json.dumps(_flat(strategy), sort_keys=True, default=repr).encode()
    digests = world.gather(_bytes(hashlib.sha256(text).digest(), world)).tolist()
    if all(digest == digests[0] for digest in digests):
        return
    lengths = world.gather(torch.tensor(len(text), device=world.device)).tolist()
    texts = world.gather(_bytes(text.ljust(max(lengths)), world))
    declared = [json.loads(bytes(row.tolist())[:n]) for row, n in zip(texts, lengths, strict=True)]
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
            yield f"{key} = " + ", ".join(f"{value} on {_ranks(some)}" for value, some in ranks.items())


def _ranks(some: list[int]) -> str:
    shown = ", ".join(map(str, some[:8])) + (" ..." if len(some) > 8 else "")
    return f"rank {shown}" if len(some) == 1 else f"ranks {shown}"


def _bytes(data: bytes, world: World) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(world.device)


def check_weights(used: bool | None, n: float, world: World) -> tuple[bool | None, list[float]]:
    """Do all ranks use `fleet.weight`, or none? None: nobody knows yet. And what they gave, where it is not 0."""
    known = -1.0 if used is None else float(used)
    answers = world.gather(torch.tensor([known, n], dtype=torch.float64, device=world.device)).tolist()
    using = [rank for rank, (yes, _) in enumerate(answers) if yes == 1]
    others = [rank for rank, (yes, _) in enumerate(answers) if yes == 0]
    if using and others:
        raise UsageError(
            f"fleet.weight was called on {_ranks(using)} and not on {_ranks(others)}: call it on every rank or on none"
        )
    return bool(using) if using or others else None, [given for _, given in answers if given]


def join(loader: Iterable[Any], world: World) -> Iterator[Any]:
    """The batches of a loader, as long as every rank has one."""
    batches, count = iter(loader), 0
    while True:
        batch = next(batches, _NONE)
        have = world.gather(torch.tensor(batch is not _NONE, device=world.device).to(torch.uint8)).tolist()
        if not all(have):
            ended = [rank for rank, yes in enumerate(have) if not yes]
            if any(have):
                warnings.warn(
                    f"{_ranks(ended)} ran out of batches after {count}; what the others still have is left out",
                    stacklevel=2,
                )
            return
        count += 1
        yield batch


_NONE = object()
