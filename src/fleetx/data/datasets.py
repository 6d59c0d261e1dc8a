"""`fleet.loader`: any map-style `torch.utils.data.Dataset`, divided between ranks and resumable like other loaders."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Unpack

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from fleetx.data import rng
from fleetx.data.checks import check_names
from fleetx.data.fingerprint import fingerprint
from fleetx.data.loader import Loader, LoaderOptions, RecordSource
from fleetx.data.sharding_plan import MaxSamples
from fleetx.errors import DataError, UsageError


def load_dataset(
    dataset: Dataset[Any],
    batch_size: int,
    shuffle: bool = True,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    **options: Unpack[LoaderOptions],
) -> DatasetLoader:
    """Load any map-style dataset: `dataset[i]` for i from 0 to len(dataset) - 1.

    batch_size: samples per rank and step. Every rank gets the same number of batches. The last ones of an epoch may be
        smaller, and their size may differ between ranks: pass it to `fleet.weight`, or set drop_last.
    collate_fn: turns a list of samples into a batch; torch's `default_collate` if not given.

    The other options are those of `fleetx.data.Loader`. Seed, epoch and i determine what `dataset[i]` draws from the
    generators of torch, numpy and random, whichever rank or worker reads it.
    """
    _check(dataset, options)
    source = DatasetSource(dataset, collate_fn or default_collate)
    loader = DatasetLoader(source, MaxSamples(batch_size), shuffle=shuffle, **options)
    loader.dataset, loader.batch_size = dataset, batch_size
    return loader


class DatasetLoader(Loader):
    """A loader with a `dataset` attribute, like a DataLoader: scripts print `len(loader.dataset)`."""

    dataset: Dataset[Any]
    batch_size: int


def _check(dataset: Any, options: LoaderOptions) -> None:
    if isinstance(dataset, DataLoader):
        raise UsageError("this is a DataLoader: pass its dataset to fleet.loader, which makes the batches itself")
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise UsageError(
            f"{type(dataset).__name__} is not map-style: its samples have no index, so they cannot be divided, "
            "shuffled or resumed. Give it __getitem__ and __len__; or let each rank take its share in __iter__ "
            "(fleet.replica_index() of fleet.replica_num()), and iterate with fleet.join(DataLoader(dataset, ...))"
        )
    check_names("a loader of a dataset", options, ("batch_size", "shuffle", *LoaderOptions.__annotations__))
    if options.get("on_error", "raise") == "skip":
        raise UsageError(
            'on_error="skip" is not supported here, because an error from a dataset does not say what is invalid: '
            "remove it"
        )


class DatasetSource(RecordSource):
    """Samples by index. A batch is what collate_fn returns."""

    def __init__(self, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any]):
        self.invalid: list[str] = []
        self._dataset, self._collate = dataset, collate_fn

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def fingerprint(self) -> str:
        """Of its class and length, not of its content, which only the dataset can read and which may be random."""
        kind = type(self._dataset)
        return fingerprint(kind.__module__, kind.__qualname__, len(self))

    def read(self, rows: np.ndarray, seed: int, epoch: int) -> tuple[Any, list[str]]:
        numbers = rows[:, 0].tolist()
        key = rng.key(seed, epoch, "dataset")
        with _generators():
            if hasattr(self._dataset, "__getitems__"):
                _seed(key ^ numbers[0])
                samples = self._dataset.__getitems__(numbers)
            else:
                samples = [self._sample(number, key) for number in numbers]
        return self._collate(samples), []

    def _sample(self, number: int, key: int) -> Any:
        _seed(key ^ number)
        try:
            return self._dataset[number]
        except IndexError as error:
            raise DataError(f"dataset[{number}] raised IndexError, but its length is {len(self)}: {error}") from error


def _seed(number: int) -> None:
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number & 0xFFFFFFFF)


@contextmanager
def _generators() -> Iterator[None]:
    """Restore the generators: what a sample draws must not change what training draws. Workers need not do so."""
    if get_worker_info() is not None:
        yield
        return
    kept = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])
