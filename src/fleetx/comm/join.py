"""How a process joins the others: its device, its process group, and errors that say why it cannot."""

from __future__ import annotations

import atexit
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from fleetx.base import seams
from fleetx.base.user_line import warn
from fleetx.comm.roles import ProcessInfo, several_nodes
from fleetx.comm.world import TIMEOUT, World, forget_groups
from fleetx.errors import WorldError


def enter(process: ProcessInfo, *, timeout: timedelta = TIMEOUT, env: Mapping[str, str] = os.environ) -> World:
    """Join the other processes. If the script has already made a process group, use it."""
    device = device_of(process, env)
    if dist.is_initialized():
        if process.launched and (process.rank, process.size) != (dist.get_rank(), dist.get_world_size()):
            raise WorldError(
                f"the script's own process group says rank {dist.get_rank()} of {dist.get_world_size()}, but the "
                f"launcher says {process.rank} of {process.size}: do not create a process group before fleet.init()"
            )
        process = ProcessInfo(dist.get_rank(), dist.get_world_size(), process.local_rank, process.endpoints)
    elif process.launched:
        _meet(process, device, timeout)
    elif said := several_nodes(env):
        warn(f"{said}, but this worker trains alone: start it with `fleetrun script.py`, which reads that variable")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        _start_autograd()
    return World(process, device, timeout)


def _start_autograd() -> None:
    """Run a first backward, which decides whether forked processes may run one: not if torch sees a GPU.

    Once fake tensors have been used, a CUDA build of torch sees a GPU even where there is none, and `auto` uses both
    fake tensors and forks.
    """
    with torch.inference_mode(False), torch.enable_grad():
        torch.ones((), device="cpu", requires_grad=True).backward()


def device_of(process: ProcessInfo, env: Mapping[str, str]) -> torch.device:
    """The device of this process: FLEETX_DEVICE if set, else a GPU if there is one."""
    kind = env.get("FLEETX_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise WorldError(f"FLEETX_DEVICE={kind}: must be cpu or cuda")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    index = int(env.get("FLAGS_selected_gpus", "").split(",")[0] or process.local_rank)
    if index >= count:
        raise WorldError(
            f"worker {process.rank} needs GPU {index}, but this machine has {count}: start fewer workers, or set "
            "FLEETX_DEVICE=cpu"
        )
    return torch.device("cuda", index)


def _meet(process: ProcessInfo, device: torch.device, timeout: timedelta) -> None:
    _check_address(process)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    method = f"tcp://{process.master}" if process.master else "env://"
    try:
        dist.init_process_group(
            backend, init_method=method, rank=process.rank, world_size=process.size, timeout=timeout
        )
    except (RuntimeError, ValueError) as error:
        where = process.master or f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        first = str(error).strip().split("\n")[0]
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise WorldError(
                f"rank {process.rank} on {socket.gethostname()} cannot listen at {where}: the port is in use. Is "
                "another job running, or has an earlier one not ended? Choose another port"
            ) from error
        raise WorldError(
            f"rank {process.rank} of {process.size} could not reach the others at {where}: {first}. Check that all "
            f"{process.size} workers are started with this address and can reach it"
        ) from error
    atexit.register(_leave)


def _check_address(process: ProcessInfo, env: Mapping[str, str] = os.environ, *, patience: float = 60.0) -> None:
    """Raise an error if the address of rank 0 does not resolve, or leads each machine to itself, as 127.0.x.x does.

    Ranks on several machines would wait there until the timeout. Several launchers may run on one machine, so such an
    address is wrong only if nothing listens there.
    """
    host, _, port = (process.master or f"{env.get('MASTER_ADDR', '')}:{env.get('MASTER_PORT', '')}").rpartition(":")
    here = env.get("LOCAL_WORLD_SIZE", "")
    try:
        address = str(socket.getaddrinfo(host.strip("[]"), None)[0][4][0])
    except OSError:
        raise WorldError(f"the address of rank 0, {host!r}, does not resolve: add it to /etc/hosts or DNS") from None
    if process.rank == 0 or not here.isdigit() or int(here) >= process.size or not address.startswith("127."):
        return
    end = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((address, int(port)), timeout=2).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise WorldError(
                    f"rank {process.rank} on {socket.gethostname()}: the address of rank 0, {host}, makes every "
                    f"machine connect to itself. Nothing listens on port {port} here, and only {here} of "
                    f"{process.size} ranks are on this machine: set MASTER_ADDR to an address of rank 0 that the "
                    "others can reach"
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
    forget_groups()
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
