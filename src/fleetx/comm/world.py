"""Rank, size, device, process group and collectives. Works with a single process too."""

from __future__ import annotations

import atexit
import gc
import hashlib
import json
import os
import socket
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fleetx.base import seams
from fleetx.base.user_line import warn
from fleetx.comm.roles import Place, several_nodes
from fleetx.comm.session import waits
from fleetx.errors import WorldError

# gloo's default is half an hour: too long for a user to wait to learn that a peer is dead.
TIMEOUT = timedelta(minutes=10)
_BROADCAST_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class World:
    """The processes that train together, as one of them sees them. Collectives are no-ops in a world of one."""

    place: Place
    device: torch.device
    timeout: timedelta = TIMEOUT
    members: dist.ProcessGroup | None = None  # None: every process
    siblings: tuple[tuple[int, ...], ...] = ()  # this world and those that `split` made together with it
    groups: list[dist.ProcessGroup] = field(
        default_factory=list, compare=False, repr=False
    )  # made by and for its owner

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.size

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
        """A process group of this rank only. The other ranks need not call it."""
        return self._new_group([self.number(self.rank)], alone=True)

    def _new_group(self, ranks: list[int], *, alone: bool = False) -> dist.ProcessGroup:
        made = dist.new_group(ranks, timeout=self.timeout, use_local_synchronization=alone)
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
        return replace(self._place(mine), members=members, siblings=tuple(made))

    def subset(self, ranks: list[int]) -> World | None:
        """A world of some of the ranks; None on the others. Every rank must call it, even in sibling worlds."""
        group = self.group(ranks)
        return replace(self._place(ranks), members=group, siblings=()) if self.rank in ranks else None

    def _place(self, ranks: list[int]) -> World:
        endpoints = self.place.endpoints
        known = tuple(endpoints[r] for r in ranks) if len(endpoints) == self.size else ()
        return replace(self, place=replace(self.place, rank=ranks.index(self.rank), size=len(ranks), endpoints=known))

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
        endpoint = self.place.endpoints[self.rank] if len(self.place.endpoints) == self.size else ""
        name = f"{endpoint.rpartition(':')[0]} {socket.gethostname()}"
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
        return self.gather(torch.tensor(number, device=self.device)).tolist()

    @waits
    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.members)


_owned: list[tuple[weakref.ref[object], World]] = []


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


def listed(ranks: list[int]) -> str:
    """For messages: `rank 1`, or `ranks 0, 2, 3`."""
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _encode(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(text: Tensor) -> Any:
    return json.loads(bytes(text.tolist()))


def enter(place: Place, *, timeout: timedelta = TIMEOUT, env: Mapping[str, str] = os.environ) -> World:
    """Join the other processes. If the script has already made a process group, use it."""
    device = device_of(place, env)
    if dist.is_initialized():
        if place.launched and (place.rank, place.size) != (dist.get_rank(), dist.get_world_size()):
            raise WorldError(
                f"the script's own process group says rank {dist.get_rank()} of {dist.get_world_size()}, but the "
                f"launcher says {place.rank} of {place.size}: do not make a group before fleet.init()"
            )
        place = Place(dist.get_rank(), dist.get_world_size(), place.local_rank, place.endpoints)
    elif place.launched:
        _meet(place, device, timeout)
    elif said := several_nodes(env):
        warn(f"{said}, but this worker trains alone: start it with `fleetrun script.py`, which reads that variable")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        _start_autograd()
    return World(place, device, timeout)


def _start_autograd() -> None:
    """Run a first backward, which decides whether forked processes may run one: not if torch sees a GPU.

    Once fake tensors have been used, a CUDA build of torch sees a GPU even where there is none, and `auto` uses both
    fake tensors and forks.
    """
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones((), device="cpu", requires_grad=True).backward()


def device_of(place: Place, env: Mapping[str, str]) -> torch.device:
    """The device of this process: FLEETX_DEVICE if set, else a GPU if there is one."""
    kind = env.get("FLEETX_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise WorldError(f"FLEETX_DEVICE={kind}: must be cpu or cuda")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    index = int(env.get("FLAGS_selected_gpus", "").split(",")[0] or place.local_rank)
    if index >= count:
        raise WorldError(
            f"worker {place.rank} needs GPU {index}, but this machine has {count}: start fewer workers, or set "
            "FLEETX_DEVICE=cpu"
        )
    return torch.device("cuda", index)


def _meet(place: Place, device: torch.device, timeout: timedelta) -> None:
    _check_address(place)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    method = f"tcp://{place.master}" if place.master else "env://"
    try:
        dist.init_process_group(backend, init_method=method, rank=place.rank, world_size=place.size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        where = place.master or f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        first = str(error).strip().split("\n")[0]
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise WorldError(
                f"rank {place.rank} on {socket.gethostname()} cannot listen at {where}: the port is in use. Is another "
                "job running, or has an earlier one not ended? Choose another port"
            ) from error
        raise WorldError(
            f"rank {place.rank} of {place.size} could not reach the others at {where}: {first}. Check that all "
            f"{place.size} workers are started with this address and can reach it"
        ) from error
    atexit.register(_leave)


def _check_address(place: Place, env: Mapping[str, str] = os.environ, *, patience: float = 60.0) -> None:
    """Raise an error if the address of rank 0 does not resolve, or leads each machine to itself, as 127.0.x.x does.

    Ranks on several machines would wait there until the timeout. Several launchers may run on one machine, so such an
    address is wrong only if nothing listens there.
    """
    host, _, port = (place.master or f"{env.get('MASTER_ADDR', '')}:{env.get('MASTER_PORT', '')}").rpartition(":")
    here = env.get("LOCAL_WORLD_SIZE", "")
    try:
        address = str(socket.getaddrinfo(host.strip("[]"), None)[0][4][0])
    except OSError:
        raise WorldError(f"the address of rank 0, {host!r}, does not resolve: add it to /etc/hosts or DNS") from None
    if place.rank == 0 or not here.isdigit() or int(here) >= place.size or not address.startswith("127."):
        return
    end = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((address, int(port)), timeout=2).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise WorldError(
                    f"rank {place.rank} on {socket.gethostname()}: the address of rank 0, {host}, makes every "
                    f"machine connect to itself. Nothing listens on port {port} here, and only {here} of {place.size} "
                    "ranks are on this machine: set MASTER_ADDR to an address of rank 0 that the others can reach"
                ) from None
            time.sleep(0.2)


def rejoin(world: World, host: str, port: int, listening: int) -> World:
    """In a forked child: forget the parent's groups, whose threads do not exist here, and join the other children.

    listening: on rank 0, a socket that already listens. Otherwise a child that connects before rank 0 listens may get
    that very port as its local port, and would connect to itself.
    """
    torchs = seams.c10d_world
    _of_the_parent.extend([*torchs.pg_map, torchs.default_pg])  # kept: destroying them here would hang
    for table in seams.GROUP_TABLES:
        getattr(torchs, table).clear()
    _owned.clear()
    torchs.default_pg, torchs.group_count = None, 0
    seams.unregister_groups()
    if world.size > 1:
        first = world.rank == 0
        store = dist.TCPStore(
            host, port, world.size, first, world.timeout, master_listen_fd=listening if first else None
        )
        backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=world.timeout)
    return replace(world, members=None, siblings=())


_of_the_parent: list[object] = []


def _leave() -> None:
    """Destroy the process group. Without this, gloo's threads abort one exit in five, after a successful run."""
    if dist.is_initialized():
        dist.destroy_process_group()
