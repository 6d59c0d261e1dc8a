"""`fleet.join`: iterate as long as every rank has a batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fleetx.base.user_line import warn
from fleetx.comm.session import current
from fleetx.comm.world import World, listed

_NONE = object()


def join(loader: Iterable[Any]) -> Iterator[Any]:
    """`for batch in fleet.join(loader)`: stop all ranks together when the first one runs out of batches.

    Otherwise ranks with different numbers of batches wait for each other until the timeout. A warning names the rank
    that ran out. Costs one small collective per batch.
    """
    return _joined(loader, current().here())


def _joined(loader: Iterable[Any], world: World) -> Iterator[Any]:
    batches, count = iter(loader), 0
    while True:
        batch = next(batches, _NONE)
        have = world.gather(torch.tensor(batch is not _NONE, device=world.device).to(torch.uint8)).tolist()
        if not all(have):
            ended = [rank for rank, yes in enumerate(have) if not yes]
            if any(have):
                warn(
                    f"{listed(ended)} ran out of batches after {count}; the remaining batches of the others are unused"
                )
            return
        count += 1
        yield batch
