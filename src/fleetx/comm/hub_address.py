"""How the watchers of the ranks find each other: through the store, before fleetx's first collective.

The main thread waits for this, for milliseconds: any rank that is lost afterwards has a watcher that can report it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from fleetx.comm.world import World, listed
from fleetx.errors import WorldError

POLL = 0.02  # seconds


def find(world: World, store: Any) -> tuple[dict[str, Any], socket.socket | None]:
    """The first message for the watcher of this rank; on rank 0 also the socket on which it accepts the others."""
    name = socket.gethostname()
    try:
        store.set(f"fleetx/host/{world.rank}", json.dumps([name, _machine()]))
        listener = None
        if world.rank == 0:
            hosts = [json.loads(_read(store, f"fleetx/host/{rank}", rank, world)) for rank in range(world.size)]
            listener = _listen(_addresses(world, len({machine for _, machine in hosts}) > 1), world.size)
            hub, token = listener.getsockname()[:2], secrets.token_hex(16)
            store.set("fleetx/hub", json.dumps([*hub, name, token]))
        address, port, host, token = json.loads(_read(store, "fleetx/hub", 0, world))
    except RuntimeError as error:
        if isinstance(error, WorldError):
            raise
        first = str(error).strip().splitlines()[0]
        raise WorldError(
            f"rank {world.rank} on {name} lost the store of the job in fleet.init: {first}. The process that keeps it "
            "(rank 0, or the launcher) has ended: look at its log"
        ) from error
    start = {"rank": world.rank, "size": world.size, "pid": os.getpid(), "host": name}
    return start | {"hub": [address, port], "hub_host": host, "token": token}, listener


def _read(store: Any, key: str, rank: int, world: World) -> bytes:
    """Wait for what another rank writes in fleet.init."""
    end, pause = time.monotonic() + world.timeout.total_seconds(), 0.0002
    while not store.check([key]):
        if time.monotonic() > end:
            raise WorldError(
                f"rank {world.rank} on {socket.gethostname()} waited {world.timeout} in fleet.init for "
                f"{listed([rank])}, which has joined the process group: every rank must call fleet.init"
            )
        time.sleep(pause)
        pause = min(2 * pause, POLL)
    return bytes(store.get(key))


def _listen(addresses: list[str], size: int) -> socket.socket:
    for address in addresses:
        with contextlib.suppress(OSError):
            return socket.create_server((address, 0), backlog=size)
    raise WorldError(
        f"the watcher of rank 0 cannot listen on {' or '.join(addresses)}: is that an address of this machine? Correct "
        "/etc/hosts or MASTER_ADDR, or set FLEETX_WATCH=0 to train without it"
    )


def _machine() -> str:
    """The kernel and network namespace: the same for processes that can reach each other on loopback."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        return socket.gethostname()


def _addresses(world: World, several: bool) -> list[str]:
    """Where the watcher of rank 0 listens: on loopback, unless ranks are on several machines."""
    if not several:
        return ["127.0.0.1"]
    known = [end.rpartition(":")[0] for end in world.process.endpoints[:1]]
    names = [os.environ.get("MASTER_ADDR", ""), *known, socket.gethostname()]
    found = []
    for name in filter(None, names):
        with contextlib.suppress(OSError):
            found.append(socket.gethostbyname(name))
    real = [address for address in dict.fromkeys(found) if not address.startswith("127.")]
    if not real:
        raise WorldError(
            f"{socket.gethostname()} resolves to {found[-1] if found else 'nothing'}, which other machines cannot "
            "reach: give it its real address in /etc/hosts"
        )
    return real
