"""A loader: seed and epoch determine the order, which is split among the ranks and read by torch's DataLoader.

    for batch in loader:        # or loader(): one epoch; the next `for` runs the next epoch
        ...
    state = loader.state_dict() # after any batch; equal on all ranks; any number of ranks can resume from it

The state counts batches that the loop has received, not those that workers have prefetched. After the last batch of an
epoch it is the start of the next epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fleetx.base.trees import map_tensors
from fleetx.data import rank_share, rng
from fleetx.data.checks import ON_ERROR, RecordErrors, check_choice, check_int
from fleetx.data.fingerprint import fingerprint
from fleetx.data.sharding_plan import BatchLimit, batch_bounds
from fleetx.errors import DataError, UsageError

log = logging.getLogger(__name__)
_VERSION = 2
_BY_VALUE = 1 << 20  # bytes; larger tensors are faster through shared memory

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class EpochOrder:
    """The samples of an epoch, in order."""

    rows: np.ndarray  # (samples, k): what a source needs to read each sample
    lengths: np.ndarray  # (samples,): tokens in each sample, or 1


class Source(Protocol):
    """What a loader reads from. It is copied to the workers."""

    invalid: list[str]  # messages about records that were skipped when the source was made

    def __len__(self) -> int:
        """The number of records."""

    def fingerprint(self) -> str:
        """Identifies the records and the samples built from them. Large content may be hashed in part."""

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> EpochOrder: ...

    def read(self, rows: np.ndarray, seed: int, epoch: int) -> tuple[Any, list[str]]:
        """Return the batch of these rows, and a message for each invalid record that it leaves out.

        A batch without valid records is empty.
        """


class RecordSource(Sized):
    """A source whose records are its samples."""

    def order(self, seed: int, epoch: int, *, shuffle: bool) -> EpochOrder:
        order = rng.permutation(rng.key(seed, epoch, "order"), len(self)) if shuffle else np.arange(len(self))
        return EpochOrder(order[:, None], np.ones(len(self), np.int64))


class LoaderOptions(TypedDict, total=False):
    """Options of every loader; see `Loader`."""

    seed: int
    drop_last: bool
    on_error: str
    shard: bool
    replica: tuple[int, int] | None
    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool
    device: torch.device | str | None


@dataclass(frozen=True)
class _Pass:
    """One pass over an epoch or the rest of it."""

    epoch: int
    bounds: np.ndarray
    rank: int
    ranks: int

    def __len__(self) -> int:
        return (len(self.bounds) - 1) // self.ranks


class Loader:
    """Yields batches: dicts of named tensors, or what a dataset's collate_fn returns.

    seed: with the epoch, determines the order and everything random in a sample.
    drop_last: only full batches. Samples at the end of the epoch that do not fill a step of all ranks are dropped.
    on_error: "raise", or "skip" to leave out invalid records, count them in `skipped` and log them after the epoch. If
    a batch has no valid record, the next valid one replaces it, because the other ranks wait for the batch.
    shard: False gives all batches to every rank.
    replica: (index, number) of the share to read. By default fleet decides, whenever an epoch starts.
    Without shard=False and replica, all ranks must have the same data. They compare it in the first `for`, so every
    rank must run that one.
    num_workers, prefetch_factor, pin_memory, persistent_workers: passed to torch's DataLoader.
    device: where to copy the tensors of each batch; with pin_memory, without waiting for the copy.
    """

    def __init__(
        self,
        source: Source,
        limit: BatchLimit,
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
        device: torch.device | str | None = None,
    ):
        check_int(least=0, seed=seed)
        check_choice("on_error", on_error, ON_ERROR)
        if replica is not None and not 0 <= replica[0] < replica[1]:
            raise UsageError(f"replica = {replica}: must be (index, number) with 0 <= index < number")
        if replica is not None and not shard:
            raise UsageError("replica selects a share of the data, but shard=False selects all of it: pass only one")
        if len(source) == 0:
            invalid = source.invalid
            why = f": all {len(invalid)} are invalid. The first one: {invalid[0]}" if invalid else ""
            raise DataError(f"no records to load{why}")
        self.on_error, self.skipped = on_error, 0
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self._device = None if device is None else torch.device(device)
        self._epoch, self._position = 0, 0
        self._source, self._limit, self._share = source, limit, replica if shard else (0, 1)
        self._pending = True  # the next pass starts at (epoch, position), not at the next epoch
        self._compared = self._share is not None  # the ranks have the same data, or do not share it
        self._passes = 0
        self._running: _Pass | None = None
        self._order_of: tuple[int, EpochOrder] | None = None
        self._tasks: list[tuple[np.ndarray, int, int]] = []  # arguments of Source.read, one per batch
        self._torch: DataLoader[Any] = DataLoader(
            _Dataset(source),  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._tasks,
            collate_fn=_by_value,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            generator=torch.Generator(),  # otherwise each epoch draws a number from the global generator
        )

    # --- position ---------------------------------------------------------------------------------
    @property
    def epoch(self) -> int:
        """The epoch of the current or interrupted `for`; after a complete one, the next. See `set_epoch`."""
        return self._epoch

    @property
    def position(self) -> int:
        """The number of samples of this epoch that all ranks together have received."""
        return self._position

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def shuffle(self) -> bool:
        return self._shuffle

    @property
    def drop_last(self) -> bool:
        return self._drop_last

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next `for`. It starts at the beginning, unless a loaded state is in the middle of it."""
        check_int(least=0, epoch=epoch)
        if not self._pending or epoch != self._epoch:
            self._move(epoch, 0)

    def _move(self, epoch: int, position: int) -> None:
        """Set where the next `for` starts; a running one cannot continue."""
        self._epoch, self._position, self._pending, self._running = epoch, position, True, None
        self._passes += 1

    # --- an epoch ---------------------------------------------------------------------------------
    def __call__(self) -> Iterator[Any]:
        """Paddle's style: `for batch in loader():`."""
        return iter(self)

    def __len__(self) -> int:
        """The number of batches that this rank gets from the running `for`, or from the next one."""
        return len(self._running or self._next())

    def __iter__(self) -> Iterator[Any]:
        """Start the next epoch, or finish the one of a loaded state."""
        if not self._compared:
            order = (self._seed, self._shuffle, self._drop_last, self._limit, self._epoch, self._position)
            self._compared = rank_share.check_same_data(self._fingerprint, fingerprint(*order))
        this = self._next()
        if len(this) == 0:
            raise UsageError(
                "drop_last leaves no batch, because there are too few samples for one full batch per rank: turn it "
                "off, or use a smaller batch_size"
            )
        self._epoch, self._position = this.epoch, int(this.bounds[0])
        self.skipped, self._pending, self._running = len(self._source.invalid), False, this
        self._passes += 1
        return self._run(this, self._passes)

    def _next(self) -> _Pass:
        if self._pending:
            rest = self._pass(self._epoch, self._position)
            if len(rest) or self._position == 0:
                return rest
        return self._pass(self._epoch + 1, 0)

    def _pass(self, epoch: int, position: int) -> _Pass:
        rank, ranks = self._share or rank_share.current()
        lengths = self._order(epoch).lengths
        return _Pass(epoch, batch_bounds(self._limit, lengths, position, ranks, drop_last=self._drop_last), rank, ranks)

    def _order(self, epoch: int) -> EpochOrder:
        if self._order_of is None or self._order_of[0] != epoch:
            self._order_of = epoch, self._source.order(self._seed, epoch, shuffle=self._shuffle)
        return self._order_of[1]

    def _run(self, this: _Pass, number: int) -> Iterator[Any]:
        self._check_latest(number)
        rows, bounds = self._order(this.epoch).rows, this.bounds
        mine = range(this.rank, len(bounds) - 1, this.ranks)
        self._tasks[:] = [(rows[bounds[i] : bounds[i + 1]], self._seed, this.epoch) for i in mine]
        errors = RecordErrors(self.on_error)
        replaced = 0
        try:
            for step, (batch, invalid) in enumerate(self._torch):
                errors.add(*invalid)
                self.skipped += len(invalid)
                if invalid and not batch:
                    batch = self._substitute(rows, int(bounds[mine[step] + 1]), this.epoch, invalid[0])
                    replaced += 1
                self._position = int(bounds[(step + 1) * this.ranks])
                batch = dict(batch) if isinstance(batch, _ByValue) else batch
                yield batch if self._device is None else map_tensors(self._move_tensor, batch)
                self._check_latest(number)
        finally:
            if number == self._passes:
                self._running = None
                if self._position == bounds[-1]:
                    self._epoch, self._position, self._pending = this.epoch + 1, 0, True
            if skipped := self._source.invalid + errors.messages:
                log.warning(
                    "epoch %d: skipped %d invalid records%s; the first one: %s", this.epoch, len(skipped),
                    f" and replaced {replaced} batches without a valid one" if replaced else "", skipped[0],
                )  # fmt: skip

    def _move_tensor(self, t: Tensor) -> Tensor:
        return t.to(self._device, non_blocking=True)

    def _substitute(self, rows: np.ndarray, start: int, epoch: int, problem: str) -> Any:
        """The next valid record, wrapping around. No rank needs to know what the others have read."""
        for place in range(start, start + len(rows)):
            batch, _ = self._source.read(rows[[place % len(rows)]], self._seed, epoch)
            if batch:
                return batch
        raise DataError(f"every record is invalid, so there is nothing to read. One of them: {problem}")

    def _check_latest(self, number: int) -> None:
        if number != self._passes:
            raise UsageError(
                "this `for` over the loader cannot continue: another one was started, or the epoch or state was set. "
                "Iterate over the loader once at a time"
            )

    # --- resuming ---------------------------------------------------------------------------------
    @cached_property
    def _fingerprint(self) -> str:
        return self._source.fingerprint()

    def state_dict(self) -> dict[str, int | bool | str]:
        """The position after the last batch that was returned, counted in samples over all ranks."""
        ended = self._running is not None and self._position == int(self._running.bounds[-1])  # no NumPy in the state
        return {
            "version": _VERSION,
            "epoch": self._epoch + ended, "position": 0 if ended else self._position,
            "seed": self._seed, "shuffle": self._shuffle, "data": self._fingerprint,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, int | bool | str]) -> None:
        """Resume after the last batch that was returned, with any number of ranks."""
        mine = self.state_dict()
        if state.keys() != mine.keys() or state["version"] != _VERSION:
            raise UsageError("this is not the state of a fleetx loader, or it is from a different version of fleetx")
        differs = [f"{n} = {state[n]}, but this one has {mine[n]}" for n in ("seed", "shuffle") if state[n] != mine[n]]
        if state["data"] != mine["data"]:
            differs.append("other data: a different dataset or length, or different files, vocabulary or options")
        if differs:
            raise UsageError(
                f"the state belongs to a loader with {differs[0]}. The order would differ, so samples would be lost or "
                "repeated: create the loader as in the saved run"
            )
        self._move(int(state["epoch"]), int(state["position"]))


@dataclass(frozen=True)
class _Dataset:
    """For torch's DataLoader: an item is a batch."""

    source: Source

    def __getitem__(self, task: tuple[np.ndarray, int, int]) -> tuple[Any, list[str]]:
        return self.source.read(*task)


class _ByValue(dict[str, Tensor]):
    """A batch whose small tensors are pickled by value.

    torch passes each tensor in its own shared memory file, which takes about four times as long for the seven small
    tensors of a BERT batch.
    """

    def __reduce__(self) -> Any:
        sent = {name: tensor.numpy() if tensor.nbytes < _BY_VALUE else tensor for name, tensor in self.items()}
        return _received, (sent,)


def _received(sent: dict[str, Any]) -> Batch:
    return {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in sent.items()}


def _by_value(item: Any) -> tuple[Any, list[str]]:
    batch, invalid = item
    named = type(batch) is dict and all(type(t) is Tensor for t in batch.values())
    return _ByValue(batch) if named else batch, invalid
