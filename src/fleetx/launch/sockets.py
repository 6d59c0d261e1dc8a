"""Listening sockets, each bound to one address, and the attempts of a single node.

This module does not import torch: the first workers start, and know the port of their store, before torch is loaded.
"""

from __future__ import annotations

import errno
import os
import socket

from fleetx.errors import LaunchError
from fleetx.launch.environment import first_port
from fleetx.launch.job import Attempt

LOOPBACK = "127.0.0.1"


def listen(host: str, *, port: int = 0) -> socket.socket:
    """Listen on one address only; by default a TCPStore listens on all of them."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LaunchError(f"cannot resolve host {host} ({reason})") from None
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(4096)
    except OSError as error:
        listener.close()
        hint = ""
        if error.errno == errno.EADDRINUSE and port:
            hint = "; choose another port with --master"
        elif error.errno == errno.EADDRNOTAVAIL:  # perhaps the network translates it (NAT)
            hint = "; node 0 must be named by an address of one of its own interfaces"
        raise LaunchError(f"cannot listen on {host}:{port} ({error.strerror}){hint}") from None
    return listener


def free_ports(count: int) -> list[int]:
    """Distinct loopback ports that are free right now."""
    listeners = [listen(LOOPBACK) for _ in range(count)]
    ports = [port_of(listener) for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def single_node_attempt(
    slots: tuple[int, ...], *, number: int = 0, restarts: int = 0, run_id: str = ""
) -> tuple[Attempt, socket.socket]:
    """The attempt, and the socket on which its store will listen."""
    listener = listen(LOOPBACK)
    first = first_port()
    ports = [first + index for index in range(len(slots))] if first else free_ports(len(slots))
    attempt = Attempt(
        number=number,
        run_id=run_id or os.urandom(6).hex(),
        master_addr=LOOPBACK,
        master_port=port_of(listener),
        endpoints=tuple(f"{LOOPBACK}:{port}" for port in ports),
        nodes=1,
        node=0,
        slots=slots,
        restarts=restarts,
    )
    return attempt, listener
