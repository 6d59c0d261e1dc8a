"""Listening sockets, bound to one address each, and the world that one node can make of them.

No torch here: the first socket exists, and the first workers know its port, before torch is imported.
"""

from __future__ import annotations

import errno
import socket

from fleetx.errors import LaunchError
from fleetx.launch.environment import first_port
from fleetx.launch.job import Job, World

LOOPBACK = "127.0.0.1"


def listen(host: str, *, port: int = 0) -> socket.socket:
    """Listen on one address only; TCPStore left to itself would listen on all of them."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise LaunchError(f"{host}: no such host ({error.strerror})") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            listener.bind(("", port))  # an address that the network translates to ours: it belongs to no interface
        listener.listen(4096)
    except OSError as error:
        listener.close()
        raise LaunchError(f"cannot listen on {host}:{port} ({error.strerror})") from None
    return listener


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody uses now, all different."""
    listeners = [listen(LOOPBACK) for _ in range(count)]
    ports = [port_of(listener) for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def world_of_one_node(job: Job, *, attempt: int, run_id: str) -> tuple[World, socket.socket]:
    """The world of one attempt, and the socket on which its store will answer."""
    listener = listen(LOOPBACK)
    first = first_port()
    ports = [first + index for index in range(job.workers)] if first else free_ports(job.workers)
    world = World(
        attempt=attempt,
        run_id=run_id,
        master_addr=LOOPBACK,
        master_port=port_of(listener),
        endpoints=tuple(f"{LOOPBACK}:{port}" for port in ports),
    )
    return world, listener
