"""A loader: an order that seed and epoch decide, dealt to the ranks, read by torch's DataLoader.

    for batch in loader:        # or loader(): one epoch; the next `for` is the next epoch
        ...
    state = loader.state_dict() # at any batch, the same on all ranks; another number of ranks may go on from it

The state counts what was handed out, not what workers have read ahead. Behind the last batch of an epoch it is the
beginning of the next.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fleetx.data import rank_share, rng, transport
from fleetx.data.checks import check_choice, check_whole
from fleetx.data.errors import ON_ERROR
from fleetx.data.fingerprint import fingerprint
from fleetx.data.sharding_plan import Cut, deal
from fleetx.errors import DataError, UsageError

log = logging.getLogger(__name__)
_VERSION = 2

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Plan:
    """An epoch: its samples in their order."""

    rows: np.ndarray  # (samples, k): what a source needs to know to read one
    lengths: np.ndarray  # (samples,): how many tokens each has; 1 where samples are alike


def plan_alike(records: int, seed: int, epoch: int, *, shuffle: bool) -> Plan:
    """Of records that are a sample each, all alike."""
    order = rng.permutation(rng.key(seed, epoch, "order"), records) if shuffle else np.arange(records)
    return Plan(order[:, None], np.ones(records, np.int64))


class Source(Protocol):
    """What a loader reads. It is copied into the workers."""

    broken: list[str]  # records that were left out when it was made, a sentence for each

    def __len__(self) -> int:
        """How many records it has."""

    def fingerprint(self) -> str:
        """Another one for other records, or other samples made of them; of pieces of the content where it is large."""

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
    A batch of which nothing is left is replaced by the next sound record, because the other ranks wait for it.
    shard: False gives every rank all batches.
    replica: (index, number) of whose share to read, where fleet is not to be asked; it is asked when an epoch begins.
    Without these two all ranks must have the same data; they compare it in the first `for`, which none may leave out.
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
        self.on_error, self.skipped = on_error, 0
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self._epoch, self._position = 0, 0
        self._source, self._cut, self._share = source, cut, replica if shard else (0, 1)
        self._fresh = True  # nothing of this epoch was begun here: the next pass begins at the position
        self._alike = self._share is not None  # need not be compared between ranks, or was
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

    # --- where it is ------------------------------------------------------------------------------
    @property
    def epoch(self) -> int:
        """That of the `for` that runs or was left; behind its end, of the next one. `set_epoch` chooses another."""
        return self._epoch

    @property
    def position(self) -> int:
        """How many samples of the epoch all ranks together were given."""
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
        """The next `for` is this epoch: from its beginning, unless a state in the middle of it was loaded."""
        check_whole(least=0, epoch=epoch)
        if not self._fresh or epoch != self._epoch:
            self._move(epoch, 0)

    def _move(self, epoch: int, position: int) -> None:
        """To where the next `for` goes on; one that runs cannot."""
        self._epoch, self._position, self._fresh, self._running = epoch, position, True, None
        self._passes += 1

    # --- an epoch ---------------------------------------------------------------------------------
    def __call__(self) -> Iterator[Batch]:
        """Paddle's way: `for batch in loader():`."""
        return iter(self)

    def __len__(self) -> int:
        """How many batches the `for` that runs gives this rank; else, how many the next one will give."""
        return len(self._running or self._next())

    def __iter__(self) -> Iterator[Batch]:
        """Begin an epoch: the next one, or what a loaded state has left of its own."""
        if not self._alike:
            order = (self._seed, self._shuffle, self._drop_last, self._cut, self._epoch, self._position)
            self._alike = rank_share.check_alike(self._fingerprint, fingerprint(*order))
        begun = self._next()
        if len(begun) == 0:
            raise UsageError("drop_last leaves no batch: there are fewer samples than one step of all ranks takes")
        self._epoch, self._position = begun.epoch, int(begun.borders[0])
        self.skipped, self._fresh, self._running = len(self._source.broken), False, begun
        self._passes += 1
        return self._run(begun, self._passes)

    def _next(self) -> _Pass:
        if self._fresh:
            rest = self._pass(self._epoch, self._position)
            if len(rest) or self._position == 0:
                return rest
        return self._pass(self._epoch + 1, 0)

    def _pass(self, epoch: int, position: int) -> _Pass:
        rank, ranks = self._share or rank_share.current()
        lengths = self._plan(epoch).lengths
        return _Pass(epoch, deal(self._cut, lengths, position, ranks, drop_last=self._drop_last), rank, ranks)

    def _plan(self, epoch: int) -> Plan:
        if self._planned is None or self._planned[0] != epoch:
            self._planned = epoch, self._source.plan(self._seed, epoch, shuffle=self._shuffle)
        return self._planned[1]

    def _run(self, begun: _Pass, number: int) -> Iterator[Batch]:
        self._stop_if_overtaken(number)
        self._tasks.give(begun, self._plan(begun.epoch), self._seed)
        problems: list[str] = []
        replaced = 0
        try:
            for step, (batch, found) in enumerate(self._torch):
                self._stop_if_overtaken(number)
                if found and self.on_error == "raise":
                    raise DataError(f'{found[0]}. on_error="skip" goes on without such records')
                problems += found
                self.skipped += len(found)
                if not batch:
                    batch = self._substitute(begun, step, found[0])
                    replaced += 1
                self._position = int(begun.borders[(step + 1) * begun.ranks])
                yield transport.unpacked(batch)
                self._stop_if_overtaken(number)
        finally:
            if number == self._passes:
                self._running = None
                if self._position == begun.borders[-1]:
                    self._epoch, self._position, self._fresh = begun.epoch + 1, 0, True
            if all_found := self._source.broken + problems:
                instead = f"; {replaced} batches of nothing else were replaced by a sound record each"
                log.warning(
                    "epoch %d: %d broken records were skipped; the first: %s%s",
                    begun.epoch, len(all_found), all_found[0], instead if replaced else "",
                )  # fmt: skip

    def _substitute(self, begun: _Pass, step: int, problem: str) -> Batch:
        """The first sound record behind a batch, in a circle: nobody needs to know what other ranks have read."""
        rows = self._plan(begun.epoch).rows
        end = int(begun.borders[step * begun.ranks + begun.rank + 1])
        for place in range(end, end + len(rows)):
            batch, _ = self._source.read(rows[[place % len(rows)]], self._seed, begun.epoch)
            if batch:
                return batch
        raise DataError(f"every record is broken, so that nothing is left to read. One of them: {problem}")

    def _stop_if_overtaken(self, number: int) -> None:
        if number != self._passes:
            raise UsageError("this loader was begun anew or given a state since: only its latest `for` can go on")

    # --- going on later ---------------------------------------------------------------------------
    @cached_property
    def _fingerprint(self) -> str:
        return self._source.fingerprint()

    def state_dict(self) -> dict[str, int | bool | str]:
        """Where the loader is: behind the last batch that it handed out, counted in samples over all ranks."""
        ended = self._running is not None and self._position == self._running.borders[-1]
        return {
            "version": _VERSION,
            "epoch": self._epoch + ended, "position": 0 if ended else self._position,
            "seed": self._seed, "shuffle": self._shuffle, "data": self._fingerprint,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, int | bool | str]) -> None:
        """The next `for` goes on behind the last batch that was handed out, with any number of ranks."""
        mine = self.state_dict()
        if state.keys() != mine.keys() or state["version"] != _VERSION:
            raise UsageError("this is no state of a fleetx loader, or one of another version")
        differs = [f"{n} = {state[n]}, and this one has {mine[n]}" for n in ("seed", "shuffle") if state[n] != mine[n]]
        if state["data"] != mine["data"]:
            differs.append("other data: other files, vocabulary, max_seq_len or generate_neg_sample")
        if differs:
            raise UsageError(
                f"the state belongs to a loader with {differs[0]}: the order would be another, and samples would be "
                "lost or seen twice"
            )
        self._move(int(state["epoch"]), int(state["position"]))


class _Tasks:
    """What this rank reads in the pass that is under way: the sampler of torch's DataLoader."""

    def __init__(self) -> None:
        self._tasks: list[tuple[np.ndarray, int, int]] = []

    def give(self, begun: _Pass, plan: Plan, seed: int) -> None:
        mine = range(begun.rank, len(begun.borders) - 1, begun.ranks)
        self._tasks = [(plan.rows[begun.borders[i] : begun.borders[i + 1]], seed, begun.epoch) for i in mine]

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[tuple[np.ndarray, int, int]]:
        return iter(self._tasks)


@dataclass(frozen=True)
class _Reader:
    """The dataset of torch's DataLoader: its indices are whole batches."""

    source: Source

    def __getitem__(self, task: tuple[np.ndarray, int, int]) -> tuple[dict[Any, Tensor], list[str]]:
        batch, problems = self.source.read(*task)
        return transport.packed(batch), problems


def _as_it_is(batch: Any) -> Any:
    return batch
