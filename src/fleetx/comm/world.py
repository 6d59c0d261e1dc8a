"""Rank, size, device, process group and collectives. Works with a single process too."""

from __future__ import annotations

import gc
import hashlib
import json
import socket
import weakref
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fleetx.base import seams
from fleetx.comm.roles import ProcessInfo
from fleetx.comm.session import waits

# gloo's default is half an hour: too long for a user to wait to learn that a peer is dead.
TIMEOUT = timedelta(minutes=10)
_BROADCAST_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class World:
    """The processes that train together, as one of them sees them. Collectives are no-ops in a world of one."""

    process: ProcessInfo
    device: torch.device
    timeout: timedelta = TIMEOUT
    members: dist.ProcessGroup | None = None  # None: every process
    siblings: tuple[tuple[int, ...], ...] = ()  # this world and those that `split` made together with it
    groups: list[dist.ProcessGroup] = field(
        default_factory=list, compare=False, repr=False
    )  # made by and for its owner

    @property
    def rank(self) -> int:
        return self.process.rank

    @property
    def size(self) -> int:
        return self.process.size

    # --- collectives, in place ---
    @waits
    def maximum(self, value: Tensor) -> None:
        if self.size > 1:
            dist.all_reduce(value, op=dist.ReduceOp.MAX, group=self.members)

    def largest(self, number: float) -> float:
        """The largest number of any rank."""
        found = torch.tensor([number], dtype=torch.float64, device=self.device)
        self.maximum(found)
        return found.item()

    @waits
    def sum(self, value: Tensor) -> None:
        if self.size > 1:
            dist.all_reduce(value, group=self.members)

    @waits
    def gather(self, value: Tensor) -> Tensor:
        """The values of all ranks, stacked: (size, *value.shape)."""
        out = value.new_empty(self.size * value.numel())
        if self.size > 1:
            dist.all_gather_single(out, value.reshape(-1), group=self.members)
        else:
            out.copy_(value.reshape(-1))
        return out.view(self.size, *value.shape)

    @waits
    def broadcast(self, values: list[Tensor], *, source: int = 0) -> None:
        """Overwrite with the values of one rank, in few large messages."""
        group = self.members or dist.group.WORLD
        if self.size > 1 and values and group is not None:
            # flat, because torch cannot copy a tensor to itself if a dimension of size 1 has an unusual stride
            flat = [v.view(-1) if v.is_contiguous() else v for v in values]
            seams.broadcast_coalesced(group, flat, _BROADCAST_BYTES, source)

    def group(self, ranks: list[int] | None = None) -> dist.ProcessGroup:
        """A new process group of some or all ranks, with the same timeout. Every rank must call it.

        The ranks of sibling worlds must call it too, each for its own group: torch numbers groups by how many a
        process has made, and hangs if two processes count differently.
        """
        everyone = tuple(range(self.size))
        for sibling in self.siblings or (everyone,):
            made = self._new_group([sibling[r] for r in ranks or everyone])
            if not self.siblings or self.number(self.rank) in sibling:
                mine = made
        return mine

    def alone(self) -> dist.ProcessGroup:
        """A process group of this rank only. The other ranks need not call it.

        All worlds share it, because torch may give two of them the same name.
        """
        if not _alone:
            me = [self.number(self.rank)]
            _alone.append(dist.new_group(me, timeout=self.timeout, use_local_synchronization=True))
        self.groups.extend(_alone)
        return _alone[0]

    def _new_group(self, ranks: list[int]) -> dist.ProcessGroup:
        made = dist.new_group(ranks, timeout=self.timeout)
        self.groups.append(made)
        return made

    def owned(self, owner: object) -> World:
        """The same world with its own list of the groups made from it. They are destroyed once the owner is gone."""
        _destroy_abandoned()
        made = replace(self, groups=[])
        _owned.append((weakref.ref(owner), made))
        return made

    def destroy_groups(self) -> None:
        """Destroy the groups that were made from this world. Every rank must call it."""
        for group in self.groups:
            if group in _alone:
                if any(group in world.groups for _, world in _owned if world is not self):
                    continue
                _alone.clear()
            if group is not dist.GroupMember.NON_GROUP_MEMBER and dist.is_initialized():
                dist.destroy_process_group(group)
        self.groups.clear()

    def number(self, rank: int) -> int:
        """The global rank of a rank of this world."""
        return rank if self.members is None else dist.get_global_rank(self.members, rank)

    @property
    def numbers(self) -> list[int] | None:
        """The global ranks of its members; None: every process."""
        return None if self.members is None else [self.number(rank) for rank in range(self.size)]

    def split(self, parts: list[list[int]]) -> World:
        """Split the ranks into disjoint worlds and return this rank's. Every rank must pass the same parts."""
        if len(parts) == 1:
            return self
        mine = next(part for part in parts if self.rank in part)
        made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for sibling in self.siblings or (tuple(range(self.size)),):  # their ranks split in the same way
            for ranks in (tuple(sibling[r] for r in part) for part in parts):
                made[ranks] = self._new_group(list(ranks)) if len(ranks) > 1 else None
        members = made[tuple(self.number(r) for r in mine)]
        return replace(self._numbered(mine), members=members, siblings=tuple(made))

    def subset(self, ranks: list[int]) -> World | None:
        """A world of some of the ranks; None on the others. Every rank must call it, even in sibling worlds."""
        group = self.group(ranks)
        return replace(self._numbered(ranks), members=group, siblings=()) if self.rank in ranks else None

    def _numbered(self, ranks: list[int]) -> World:
        endpoints = self.process.endpoints
        known = tuple(endpoints[r] for r in ranks) if len(endpoints) == self.size else ()
        return replace(
            self, process=replace(self.process, rank=ranks.index(self.rank), size=len(ranks), endpoints=known)
        )

    def gather_json(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, by rank. Never pickled, so what a peer sends cannot run code here."""
        text = _encode(value)
        lengths = self.gather(torch.tensor(len(text), device=self.device)).tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(text)] = text
        rows = self.gather(padded.to(self.device)).cpu()
        return [_decode(row[:length]) for row, length in zip(rows, lengths, strict=True)]

    def broadcast_json(self, value: Any) -> Any:
        """The JSON value of rank 0, on every rank; the other ranks' values are ignored."""
        text = _encode(value if self.rank == 0 else None)
        length = torch.tensor([len(text)], device=self.device)
        self.broadcast([length])
        buffer = torch.zeros(int(length.item()), dtype=torch.uint8)
        if self.rank == 0:
            buffer.copy_(text)
        buffer = buffer.to(self.device)
        self.broadcast([buffer])
        return _decode(buffer.cpu())

    def hosts(self) -> list[int]:
        """A number per rank that identifies its host. A collective."""
        # Endpoints distinguish hosts that share a name; names help where the launcher gave no endpoints.
        endpoint = self.process.endpoints[self.rank] if len(self.process.endpoints) == self.size else ""
        name = f"{endpoint.rpartition(':')[0]} {socket.gethostname()}"
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
        return self.gather(torch.tensor(number, device=self.device)).tolist()

    @waits
    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.members)


_owned: list[tuple[weakref.ref[object], World]] = []
_alone: list[dist.ProcessGroup] = []  # the one of `World.alone`, if it exists


def _destroy_abandoned() -> None:
    """Destroy the groups of owners that are gone: each costs three threads, which wake a hundred times a second.

    This waits until a new owner comes, because each rank collects garbage at a different moment, when a peer may still
    be reading from a group.
    """
    if any(world.groups for _, world in _owned):
        gc.collect()  # old models that only a reference cycle keeps alive
    gone = [entry for entry in _owned if entry[0]() is None]
    for entry in gone:
        entry[1].destroy_groups()
        _owned.remove(entry)


def forget_groups() -> None:
    """In a forked child: the parent's groups are not ours."""
    _owned.clear()
    _alone.clear()


def listed(ranks: list[int]) -> str:
    """For messages: `rank 1`, or `ranks 0, 2, 3`."""
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(text: Tensor) -> Any:
    return json.loads(bytes(text.tolist()))
