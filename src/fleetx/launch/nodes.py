"""Which of the machines in --ips this one is, and the network interface of its address."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from fleetx.errors import LaunchError


def local_addresses() -> dict[str, str]:
    """Address -> interface, for this machine. The host name is not enough: it often resolves to 127.0.1.1."""
    import psutil  # takes 25 ms, and only a run on several nodes needs it

    return {
        address.address.split("%")[0]: name
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }


def _resolve(host: str) -> set[str]:
    try:
        return {str(info[4][0]).split("%")[0] for info in socket.getaddrinfo(host, None)}
    except (OSError, ValueError):  # ValueError: not a well-formed name
        return set()


def interface_of(host: str) -> str | None:
    """The name of the interface with the address of `host`, or None if it is not an address of this machine."""
    if host.startswith("127."):  # the usual case: all of 127/8 is on this interface, so psutil is not needed
        return "lo" if os.path.exists("/sys/class/net/lo") else None
    addresses = _resolve(host)
    return next((name for address, name in local_addresses().items() if address in addresses), None)


def rank_in(ips: Sequence[str]) -> int:
    """The position of this machine in `ips`."""
    local = local_addresses()
    mine = [index for index, ip in enumerate(ips) if any(a in local or a.startswith("127.") for a in _resolve(ip))]
    if len(mine) == 1:
        return mine[0]
    if not mine:
        raise LaunchError(
            f"--ips {','.join(ips)}: none of these is an address of this machine ({', '.join(sorted(local))}); "
            f"use --rank to say which one it is, counting from 0"
        )
    matches = ", ".join(ips[index] for index in mine)
    raise LaunchError(f"--ips {','.join(ips)}: {matches} are all addresses of this machine; use --rank to choose one")
