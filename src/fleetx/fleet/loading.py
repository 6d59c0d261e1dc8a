"""`fleet.loader` and `fleet.join`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Unpack

import torch

from fleetx.base.user_line import warn
from fleetx.comm.session import current
from fleetx.comm.world import World, listed

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from fleetx.data import LoaderOptions
    from fleetx.data.datasets import DatasetLoader

_NONE = object()


def loader(
    dataset: Dataset[Any],
    batch_size: int,
    shuffle: bool = True,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    **options: Unpack[LoaderOptions],
) -> DatasetLoader:
    """A loader for any map-style dataset: each replica of the model gets its share of every epoch, in a seeded order.

    It resumes in the middle of an epoch (`fleet.checkpoints(..., loader=loader)`), even with a different number of
    ranks: no sample is lost or seen twice. `fleetx.data.load_dataset` and `fleetx.data.Loader` document the options.
    """
    from fleetx.data import load_dataset  # few scripts need it

    return load_dataset(dataset, batch_size, shuffle, collate_fn=collate_fn, **options)


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
