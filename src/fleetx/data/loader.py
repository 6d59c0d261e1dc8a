"""A loader: an order that seed and epoch decide, dealt to the ranks, read by torch's DataLoader.

    for batch in loader:        # or loader(): one epoch; the next `for` is the next epoch
        ...
    state = loader.state_dict() # at any batch, the same on all ranks; another number of ranks may go on from it

The state counts what was handed out, not what workers have read ahead.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fleetx.data import share, transport
from fleetx.data.broken import ON_ERROR, check_choice, check_whole
from fleetx.data.dealing import Cut, deal
from fleetx.errors import DataError, UsageError

log = logging.getLogger(__name__)
_VERSION = 1

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Plan:
    """An epoch: its samples in their order."""

    rows: np.ndarray  # (samples, k): what a source needs to know to read one
    lengths: np.ndarray  # (samples,): how many tokens each has; 1 where samples are alike


class Source(Protocol):
    """What a loader reads. It is copied into the workers."""

    broken: list[str]  # records that were left out when it was made, a sentence for each

    def __len__(self) -> int:
        """How many records it has."""

    def plan(self, seed: int, epoch: int, *, shuffle: bool) -> Plan: ...

    def read(self, rows: np.ndarray, seed: int, epoch: int) -> tuple[Batch, list[str]]:
        """The batch of these rows, and a sentence for each record that is broken and not in it."""


class LoaderOptions(TypedDict, total=False):
    """What every loader can be told besides its data."""

    seed: int
    drop_last: bool
    on_error: str
    shard: bool
    replica: tuple[int, int] | None
    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool


@dataclass(frozen=True)
class _Pass:
    """One way through an epoch, or through the rest of one."""

    epoch: int
    borders: np.ndarray
    rank: int
    ranks: int

    def __len__(self) -> int:
        return (len(self.borders) - 1) // self.ranks


class Loader:
    """Batches of named tensors.

    seed: decides, with the epoch, the order and everything random in a sample.
    drop_last: only full batches; samples at the end of the epoch that make no full step of all ranks are left out.
    on_error: "raise", or "skip": broken records are left out, counted in `skipped`, reported at the end of the epoch.
    shard: False gives every rank all batches.
    replica: (index, number) of whose share to read, where fleet is not to be asked; it is asked when an epoch begins.
    num_workers, prefetch_factor, pin_memory, persistent_workers: those of torch's DataLoader.
    """

    def __init__(
        self,
        source: Source,
        cut: Cut,
        *,
        shuffle: bool,
        seed: int = 0,
        drop_last: bool = False,
        on_error: str = "raise",
        shard: bool = True,
        replica: tuple[int, int] | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
    ):
        check_whole(least=0, seed=seed)
        check_choice("on_error", on_error, ON_ERROR)
        if replica is not None and not 0 <= replica[0] < replica[1]:
            raise UsageError(f"replica = {replica}: must be (index, number) with 0 <= index < number")
        if replica is not None and not shard:
            raise UsageError("replica says whose share to read, and shard=False asks for everything: pass one of them")
        if len(source) == 0:
            why = f": all {len(source.broken)} are broken. The first: {source.broken[0]}" if source.broken else ""
            raise DataError(f"there are no records to load{why}")
        self.shuffle, self.seed, self.drop_last, self.on_error = shuffle, seed, drop_last, on_error
        self.epoch, self.position, self.skipped = 0, 0, 0
        self._source, self._cut, self._share = source, cut, replica if shard else (0, 1)
        self._fresh = True  # nothing of this epoch was begun here: the next pass begins at `position`
        self._passes = 0
        self._running: _Pass | None = None
        self._planned: tuple[int, Plan] | None = None
        self._tasks = _Tasks()
        self._torch: DataLoader[Any] = DataLoader(
            _Reader(source),  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._tasks,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            generator=torch.Generator(),  # or each epoch would take a number from the user's
        )

    # --- an epoch ---------------------------------------------------------------------------------
    def __call__(self) -> Iterator[Batch]:
        """Paddle's way: `for batch in loader():`."""
        return iter(self)

    def __len__(self) -> int:
        """How many batches the `for` that runs gives this rank; else, how many the next one will give."""
        return len(self._running or self._next())

    def __iter__(self) -> Iterator[Batch]:
        """Begin an epoch: the next one, or what a loaded state has left of its own."""
        begun = self._next()
        if len(begun) == 0:
            raise UsageError("drop_last leaves no batch: there are fewer samples than one step of all ranks takes")
        self.epoch, self.position = begun.epoch, int(begun.borders[0])
        self.skipped, self._fresh, self._running = len(self._source.broken), False, begun
        self._passes += 1
        return self._run(begun, self._passes)

    def _next(self) -> _Pass:
        if self._fresh:
            rest = self._pass(self.epoch, self.position)
            if len(rest) or self.position == 0:
                return rest
        return self._pass(self.epoch + 1, 0)

    def _pass(self, epoch: int, position: int) -> _Pass:
        rank, ranks = self._share or share.current()
        return _Pass(epoch, self._borders(epoch, position, ranks), rank, ranks)

    def _borders(self, epoch: int, position: int, ranks: int) -> np.ndarray:
        return deal(self._cut, self._plan(epoch).lengths, position, ranks, drop_last=self.drop_last)

    def _plan(self, epoch: int) -> Plan:
        if self._planned is None or self._planned[0] != epoch:
            self._planned = epoch, self._source.plan(self.seed, epoch, shuffle=self.shuffle)
        return self._planned[1]

    def _run(self, begun: _Pass, number: int) -> Iterator[Batch]:
        self._tasks.give(begun, self._plan(begun.epoch), self.seed)
        ends = begun.borders[begun.ranks :: begun.ranks].tolist()
        problems: list[str] = []
        try:
            for end, (batch, found) in zip(ends, self._torch, strict=True):
                self._stop_if_overtaken(number)
                if found and self.on_error == "raise":
                    raise DataError(f'{found[0]}. on_error="skip" goes on without such records')
                problems += found
                self.skipped += len(found)
                if not batch:
                    raise DataError(f"every record of a batch is broken, so that nothing is left of it: {found[0]}")
                self.position = end
                yield transport.unpacked(batch)
                self._stop_if_overtaken(number)
        finally:
            if number == self._passes:
                self._running = None
            if all_found := self._source.broken + problems:
                log.warning(
                    "epoch %d: %d broken records were skipped; the first: %s",
                    begun.epoch, len(all_found), all_found[0],
                )  # fmt: skip

    def _stop_if_overtaken(self, number: int) -> None:
        if number != self._passes:
            raise UsageError("this loader was begun anew or given a state since: only its latest `for` can go on")

    # --- going on later ---------------------------------------------------------------------------
    def state_dict(self) -> dict[str, int | bool]:
        """Where the loader is: behind the last batch that it handed out, counted in samples over all ranks."""
        return {
            "version": _VERSION, "epoch": self.epoch, "position": self.position,
            "seed": self.seed, "shuffle": self.shuffle, "records": len(self._source),
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        """The next `for` goes on behind the last batch that was handed out, with any number of ranks."""
        mine = self.state_dict()
        if state.keys() != mine.keys() or state["version"] != _VERSION:
            raise UsageError("this is no state of a fleetx loader, or one of another version")
        for name in ("seed", "shuffle", "records"):
            if state[name] != mine[name]:
                raise UsageError(
                    f"the state belongs to a loader with {name} = {state[name]}, and this one has {mine[name]}: "
                    "the order would be another, and samples would be lost or seen twice"
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._fresh, self._running = True, None
        self._passes += 1


class _Tasks:
    """What this rank reads in the pass that is under way: the sampler of torch's DataLoader."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._seed = self._epoch = 0

    def give(self, begun: _Pass, plan: Plan, seed: int) -> None:
        mine = range(begun.rank, len(begun.borders) - 1, begun.ranks)
        self._rows = [plan.rows[begun.borders[i] : begun.borders[i + 1]] for i in mine]
        self._seed, self._epoch = seed, begun.epoch

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[tuple[np.ndarray, int, int]]:
        return ((rows, self._seed, self._epoch) for rows in self._rows)


@dataclass(frozen=True)
class _Reader:
    """The dataset of torch's DataLoader: its indices are whole batches."""

    source: Source

    def __getitem__(self, task: tuple[np.ndarray, int, int]) -> tuple[dict[Any, Tensor], list[str]]:
        batch, problems = self.source.read(*task)
        return transport.packed(batch), problems


def _as_it_is(batch: Any) -> Any:
    return batch
