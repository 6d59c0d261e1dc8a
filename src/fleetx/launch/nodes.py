"""Which of the machines named by --ips this one is, and by which interface it is reached."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from fleetx.errors import LaunchError


def local_addresses() -> set[str]:
    """The addresses of this machine's interfaces. Not by its name: many hosts file theirs under 127.0.1.1."""
    import psutil  # 25 ms that only --ips needs

    return {
        address.address.split("%")[0]
        for interface in psutil.net_if_addrs().values()
        for address in interface
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }


def is_local(ip: str, *, local: set[str]) -> bool:
    return any(address in local or address.startswith("127.") for address in _addresses_of(ip))


def _addresses_of(host: str) -> set[str]:
    try:
        return {str(info[4][0]).split("%")[0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


def interface_of(host: str) -> str | None:
    """The name of the interface that has the address of `host`, if it is one of this machine's."""
    if host.startswith("127."):  # without psutil: the usual case, and all of 127/8 is there
        return "lo" if os.path.exists("/sys/class/net/lo") else None
    import psutil

    addresses = _addresses_of(host)
    for name, found in psutil.net_if_addrs().items():
        if any(address.address.split("%")[0] in addresses for address in found):
            return name
    return None


def rank_among(ips: Sequence[str]) -> int:
    """The index of this machine in `ips`."""
    local = local_addresses()
    mine = [index for index, ip in enumerate(ips) if is_local(ip, local=local)]
    if len(mine) == 1:
        return mine[0]
    if not mine:
        raise LaunchError(
            f"--ips {','.join(ips)}: none of them is an address of this machine ({', '.join(sorted(local))}); "
            f"say with --rank which of them it is, counted from 0"
        )
    several = ", ".join(ips[index] for index in mine)
    raise LaunchError(f"--ips {','.join(ips)}: {several} are all this machine; say with --rank which one is meant")
