"""`fleet.loader`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from fleetx.data import LoaderOptions
    from fleetx.data.datasets import DatasetLoader


def loader(
    dataset: Dataset[Any],
    batch_size: int,
    shuffle: bool = True,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    **options: Unpack[LoaderOptions],
) -> DatasetLoader:
    """A loader for any map-style dataset: each replica of the model gets its share of every epoch, in a seeded order.

    It resumes in the middle of an epoch (`fleet.checkpoints(..., loader=loader)`), also with another number of ranks:
    no sample is lost or seen twice. `fleetx.data.load_dataset` and `fleetx.data.Loader` document the options.
    """
    from fleetx.data import load_dataset  # few scripts need it

    return load_dataset(dataset, batch_size, shuffle, collate_fn=collate_fn, **options)
