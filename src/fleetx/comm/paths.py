"""How a buffer is summed over the ranks, and how messages of unequal length reach all of them.

A path uses one set of process groups. Several paths carry several buffers at a time; the index of a buffer decides
which path it takes, so ranks agree without communicating.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from fleetx.base.worker_thread import WorkerThread
from fleetx.comm import duplex
from fleetx.comm.world import World

_CLOSE_SECONDS = 10.0  # how long to wait at the end for ranks that may be lost
PIECE_BYTES = 4 * 1024 * 1024  # the pieces in which a buffer passes through a hierarchy


@dataclass
class Traffic:
    """Bytes that this rank sends, counted where they are handed to the backend."""

    sent: int = 0


class Path:
    """The interface of a path."""

    def sum(self, buffer: Tensor) -> Future[Tensor]:
        """Start replacing a buffer with its sum over the ranks.

        A callback of the future must not refer to a process group, not even through a Path, Network or Outgoing. gloo
        calls it on a thread of the group and frees it there; if that drops the last reference to the group, the thread
        would wait for itself, and the process aborts.
        """
        raise NotImplementedError

    def gather(self, message: Tensor) -> list[Tensor]:
        """The messages (bytes) of all ranks, by rank. Blocks: call it on a WorkerThread."""
        raise NotImplementedError

    def gather_equal(self, message: Tensor) -> Tensor:
        """Like `gather`, for messages of equal length on all ranks: one row per rank; no lengths are exchanged."""
        raise NotImplementedError

    # --- for coded values: all of these block, so call them on a WorkerThread, all but `inward` on the same one ---
    ends = 1  # ranks that exchange coded values
    end = 0  # which of them this rank or its leader is
    leads = True  # is this rank one of them?
    _between: dist.ProcessGroup | None  # their group
    _traffic: Traffic

    def inward(self, buffer: Tensor) -> None:
        """Sum uncoded values on the ranks that lead."""

    def swap(self, rows: Tensor) -> Tensor:
        """Send each end its share of the rows. Returns what each end sent here, by end."""
        self._traffic.sent += rows.nbytes * (self.ends - 1) // self.ends
        return duplex.all_to_all(rows, self._between)

    def collect(self, rows: Tensor) -> Tensor:
        """The rows of all ends, by end."""
        return _collect(rows, self.ends, self._between, self._traffic)

    def outward(self, buffer: Tensor) -> None:
        """Copy values from the ranks that lead to the others."""

    def close(self) -> None:
        """Stop its threads."""

    def sum_here(self, buffer: Tensor) -> None:
        """A blocking `sum` for a WorkerThread, which must not share a group with other threads."""
        self.sum(buffer).wait()


class FlatPath(Path):
    """The backend's own all-reduce, over all ranks."""

    def __init__(
        self, world: World, group: dist.ProcessGroup | None, messages: dist.ProcessGroup | None, traffic: Traffic
    ):
        self._world, self._group, self._traffic = world, group, traffic
        self._messages = self._between = messages
        self.ends, self.end = world.size, world.rank
        self._pending = list[Future[Tensor]]()

    def sum(self, buffer: Tensor) -> Future[Tensor]:
        self._traffic.sent += _ring(buffer, self._world.size)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None
        done = work.get_future().then(lambda future: (future.value(), buffer)[1])  # value() raises its error
        self._pending = [*(each for each in self._pending if not each.done()), done]
        return done

    def close(self) -> None:
        """Wait for what is under way: its callbacks run Python on threads of gloo, which abort if Python has ended."""
        end = time.monotonic() + _CLOSE_SECONDS
        while time.monotonic() < end and not all(each.done() for each in self._pending):
            time.sleep(0.005)

    def gather(self, message: Tensor) -> list[Tensor]:
        return _gather(message, self._world.size, self._messages, self._traffic)

    def gather_equal(self, message: Tensor) -> Tensor:
        return _collect(message.view(1, -1), self._world.size, self._messages, self._traffic)

    def sum_here(self, buffer: Tensor) -> None:
        self._traffic.sent += _ring(buffer, self._world.size)
        dist.all_reduce(buffer, group=self._messages)


class HierarchicalPath(Path):
    """Reduce within each group of consecutive ranks, all-reduce between their leaders, broadcast within each group.

    Each of the three has its own process group, and a buffer passes through them in pieces, so one piece can travel
    between the leaders while the next is reduced and the previous one is broadcast. The leaders' all-reduce is
    asynchronous, and gloo works on two at a time: halfway through one, each rank waits and the link would be idle.

    equal: the ranks of a group hold the same values, so each group counts once, and nothing is reduced within it.
    """

    def __init__(self, world: World, size: int, traffic: Traffic, *, equal: bool, messages: bool):
        groups = [list(range(start, start + size)) for start in range(0, world.size, size)]
        self._world, self._size, self._traffic, self._equal = world, size, traffic, equal
        self.ends, self.end = len(groups), world.rank // size
        self._leader = world.rank // size * size
        self._root, self.leads = world.number(self._leader), world.rank == self._leader
        self._inward = _my_group(groups, world)
        self._outward = _my_group(groups, world)
        self._leaders = world.group([group[0] for group in groups])
        if messages:
            self._messages, self._between = _my_group(groups, world), world.group([group[0] for group in groups])
            self._uncoded = None if equal else _my_group(groups, world)
        self._threads = [WorkerThread(name, world.device) for name in ("inside", "back")]

    def close(self) -> None:
        for thread in self._threads:  # in the order in which work goes through them
            thread.stop()

    def sum(self, buffer: Tensor) -> Future[Tensor]:
        if buffer.device.type != "cpu" or not buffer.is_contiguous():  # NCCL sends in pieces itself
            return self._sum(buffer)
        pieces = buffer.view(-1).split(max(PIECE_BYTES // buffer.element_size(), 1))
        sums = [self._sum(piece) for piece in pieces]
        return sums[-1].then(lambda _: [(one.wait(), buffer)[1] for one in sums][-1])  # wait() raises its error

    def _sum(self, buffer: Tensor) -> Future[Tensor]:
        inside, back = self._threads
        done: Future[Tensor] = Future() if buffer.device.type == "cpu" else Future(devices=[buffer.device])

        def reduce() -> None:
            if not self._equal:
                dist.reduce(buffer, dst=self._root, group=self._inward)
            between = None
            if self.leads:
                self._traffic.sent += _ring(buffer, self.ends)
                between = dist.all_reduce(buffer, group=self._leaders, async_op=True)
            _follow(back.submit(lambda: broadcast(between)), done)

        def broadcast(between: dist.Work | None) -> None:
            if between is not None:
                between.wait()
            dist.broadcast(buffer, src=self._root, group=self._outward)
            done.set_result(buffer)

        _follow(inside.submit(reduce), done)
        return done

    def gather(self, message: Tensor) -> list[Tensor]:
        """The leaders exchange the messages of their groups: each crosses the link between two groups once."""
        group, leaders = self._messages, self._between
        inside = [message] if self._equal else _gather(message, self._size, group, Traffic())
        lengths = torch.tensor([m.numel() for m in inside], device=message.device)
        everything = [torch.cat([lengths.view(torch.uint8), *inside])]
        if self.leads:
            everything = _gather(everything[0], self._world.size // self._size, leaders, self._traffic)
        sizes = torch.zeros(self.ends, dtype=torch.int64, device=message.device)
        if self.leads:
            sizes.copy_(torch.tensor([m.numel() for m in everything]))
        dist.broadcast(sizes, src=self._root, group=group)
        whole = torch.cat(everything) if self.leads else message.new_empty(int(sizes.sum()))
        dist.broadcast(whole, src=self._root, group=group)
        return [m for part in whole.split(sizes.tolist()) for m in self._parted(part)]

    def gather_equal(self, message: Tensor) -> Tensor:
        group, leaders = self._messages, self._between
        inside = _collect(message.view(1, -1), self._size, group, Traffic())
        whole = inside.new_empty(self._world.size, len(message))
        if self.leads:
            whole = _collect(inside, self.ends, leaders, self._traffic)
        dist.broadcast(whole, src=self._root, group=group)
        return whole

    def inward(self, buffer: Tensor) -> None:
        if not self._equal:
            dist.reduce(buffer, dst=self._root, group=self._uncoded)

    def outward(self, buffer: Tensor) -> None:
        dist.broadcast(buffer, src=self._root, group=self._messages)

    def _parted(self, part: Tensor) -> list[Tensor]:
        head = 8 * (1 if self._equal else self._size)
        return list(part[head:].split(part[:head].clone().view(torch.int64).tolist()))


class Network:
    """What parts ask for at set-up, and the resulting paths."""

    def __init__(self, world: World):
        self.world = world
        self.communicators = 1  # how many paths
        self.inside = 1  # ranks per group of a hierarchy; 1: no hierarchy
        self.equal = False  # do the ranks of such a group hold the same values, so that each group counts once?
        self.messages = False  # will messages be gathered, or coded values exchanged?
        self.traffic = Traffic()
        self._threads: list[WorkerThread] = []
        self.thread = self.new_thread("messages")  # gathers one message after the other, in the same order on all ranks
        self._paths: list[Path] = []
        self._beside: list[Network] = []

    @property
    def plain(self) -> bool:
        """Is DDP's own all-reduce enough?"""
        return self.communicators == 1 and self.inside == 1

    @property
    def parties(self) -> int:
        """How many values a mean is taken over."""
        return self.world.size // self.inside if self.equal else self.world.size

    def open(self) -> None:
        """Make the process groups. Every rank must call it."""
        if self.world.size > 1 and not self._paths:
            self._paths = [self._make(i) for i in range(self.communicators)]

    def close(self) -> None:
        """Stop all threads. Call it before the process group is destroyed."""
        for thread in self._threads[1:]:
            thread.drain()  # they pass work on to the first thread, here or in a clone, and may get it back
        for other in self._beside:
            other.close()
        for thread in self._threads:
            thread.stop()
        for path in self._paths:
            path.close()

    def clone_groups(self) -> Network:
        """The same paths with their own process groups, so that slow work there does not block this network.

        Every rank must call it.
        """
        other = Network(self.world)
        other.communicators, other.inside, other.traffic = self.communicators, self.inside, self.traffic
        other.messages, other.equal = self.messages, self.equal
        if self.world.size > 1:
            other._paths = [other._make(i, apart=True) for i in range(self.communicators)]
            self._beside.append(other)
        return other

    def part(self, world: World) -> Network:
        """A flat network of some of the ranks, closed with this one. Every rank must call it with its own world."""
        other = Network(world)
        other.open()
        self._beside.append(other)
        return other

    def new_thread(self, name: str) -> WorkerThread:
        """A thread that `close` stops."""
        self._threads.append(WorkerThread(name, self.world.device))
        return self._threads[-1]

    def _make(self, number: int, *, apart: bool = False) -> Path:
        if self.inside > 1:
            return HierarchicalPath(self.world, self.inside, self.traffic, equal=self.equal, messages=self.messages)
        # Messages are sent from their own thread, which must not share a group with a reduction that is running.
        messages = self.world.group() if self.messages else None
        group = self.world.group() if number or apart else self.world.members
        return FlatPath(self.world, group, messages, self.traffic)

    def path(self, number: int) -> Path:
        """The path of the buffer with this index."""
        return self._paths[number % len(self._paths)]

    def sum(self, buffer: Tensor, number: int = 0) -> Future[Tensor]:
        if self.world.size == 1:
            return completed(buffer)
        return self.path(number).sum(buffer)

    def mean(self, buffer: Tensor, number: int = 0) -> Future[Tensor]:
        return self.sum(buffer.div_(self.parties), number)


def completed(value: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(value)
    return future


def inside_hosts(hosts: Sequence[Any]) -> int:
    """How many consecutive ranks share a host; 0 if hosts have different numbers of ranks."""
    size = hosts.count(hosts[0])
    even = all(len(set(hosts[i : i + size])) == 1 for i in range(0, len(hosts), size)) and len(hosts) % size == 0
    return size if even and len(set(hosts)) == len(hosts) // size else 0


def _my_group(groups: list[list[int]], world: World) -> dist.ProcessGroup | None:
    made = [world.group(ranks) for ranks in groups]  # every rank must take part in making every group
    return made[next(i for i, ranks in enumerate(groups) if world.rank in ranks)]


def _gather(message: Tensor, size: int, group: dist.ProcessGroup | None, traffic: Traffic) -> list[Tensor]:
    length = torch.tensor([message.numel()], device=message.device)
    lengths = duplex.all_gather(length, group)
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device=message.device)
    padded[: message.numel()] = message
    rows = _collect(padded.view(1, -1), size, group, traffic)
    traffic.sent += (size - 1) * length.element_size()
    return [row[:n] for row, n in zip(rows, lengths.tolist(), strict=True)]


def _collect(rows: Tensor, ends: int, group: dist.ProcessGroup | None, traffic: Traffic) -> Tensor:
    traffic.sent += rows.nbytes * (ends - 1)
    return duplex.all_gather(rows, group)


def _ring(buffer: Tensor, size: int) -> int:
    """Bytes that a rank sends in a ring all-reduce."""
    return 2 * (size - 1) * buffer.numel() * buffer.element_size() // size


def _follow(step: Future[None], done: Future[Tensor]) -> None:
    """Pass an error of this step on to the result."""

    def check(ended: Future[None]) -> None:
        try:
            ended.value()
        except Exception as error:
            done.set_exception(error)  # type: ignore[arg-type]

    step.add_done_callback(check)
