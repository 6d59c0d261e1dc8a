"""What the kernel knows about a process: is it alive, is it stopped, to which ports is it connected? No torch here.

Where there is no /proc, it knows nothing: nobody is stopped, and nothing is connected.
"""

import contextlib
import os
import select
import socket
import struct
from collections.abc import Mapping
from typing import Any

# Offset of tcpi_bytes_sent in Linux' struct tcp_info; tcpi_bytes_retrans, those that were sent again, follows.
_BYTES_SENT = 200


def readable(files: Any, seconds: float) -> list[Any]:
    """The files (numbers, or objects that have one) from which something can be read by then."""
    poll, known = select.poll(), {}
    for one in files:
        if one is not None:
            number = one if isinstance(one, int) else one.fileno()
            known[number] = one
            poll.register(number, select.POLLIN)
    return [known[number] for number, _ in poll.poll(1000 * seconds)]


def pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def parent_alive(pid: int, file: int | None) -> bool:
    """Is the process alive that started this one? file: its pidfd, if there is one."""
    return os.getppid() == pid if file is None else not readable([file], 0)


def stopped(pid: int) -> bool:
    """By a signal, or by a debugger."""
    return _stat(pid)[:1] in (["T"], ["t"])


def cpu_seconds(pid: int) -> float | None:
    """That the process has computed, in all of its threads."""
    user_and_system = _stat(pid)[11:13]
    return sum(map(int, user_and_system)) / os.sysconf("SC_CLK_TCK") if user_and_system else None


def queued(pid: int) -> bool:
    """Has the process bytes to send or to read over TCP?"""
    return any(queues != "00000000:00000000" for *_, queues in _sockets(pid))


def memory_kills() -> int:
    """How many processes the kernel has killed for lack of memory."""
    lines = _read("/proc/vmstat").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def listening(pid: int) -> list[int]:
    """The ports on which a process listens on one address, as gloo does."""
    found = _sockets(pid)
    return sorted({port for _, state, host, port, _, _ in found if state == "0A" and int(host, 16)})


def connections() -> list[tuple[int, int, int]]:
    """(file, local port, remote port) of the TCP connections of this process."""
    return [(file, local, remote) for file, state, _, local, remote, _ in _sockets(os.getpid()) if state != "0A"]


def tcp_files() -> dict[int, int]:
    """The files of the TCP connections of this process, by their inodes."""
    found: dict[int, int] = {}
    for inode, file in _socket_files(os.getpid()).items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file)) as connection:  # if not closed meanwhile
            if connection.type == socket.SOCK_STREAM and connection.family != socket.AF_UNIX:
                found[inode] = file
    return found


def bytes_sent(files: Mapping[int, int] | None = None) -> dict[int, int]:
    """Bytes that this process has sent over each of its open TCP connections, as the kernel counts them.

    files: over these only, as `tcp_files` found them, which takes most of the time.
    """
    found: dict[int, int] = {}
    for inode, file in (tcp_files() if files is None else files).items():
        try:
            if os.fstat(file).st_ino != inode:  # closed, and another file has its number
                continue
            connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=file)
            try:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            finally:
                connection.detach()  # the file is not ours to close
        except OSError:
            continue
        sent, again = struct.unpack_from("QQ", info, _BYTES_SENT)
        found[inode] = sent - again  # on a busy machine even loopback sends some again
    return found


def _sockets(pid: int) -> list[tuple[int, str, str, int, int, str]]:
    """(file, state, local host, local port, remote port, "tx:rx" queues) of the TCP sockets of a process."""
    files, found = _socket_files(pid), []
    for table in ("tcp", "tcp6"):
        for line in _read(f"/proc/{pid}/net/{table}").splitlines()[1:]:
            fields = line.split()
            inode = int(fields[9])
            if inode in files:
                (host, _, local), remote = fields[1].rpartition(":"), fields[2].rpartition(":")[2]
                found.append((files[inode], fields[3], host, int(local, 16), int(remote, 16), fields[4]))
    return found


def _socket_files(pid: int) -> dict[int, int]:
    """The numbers of the files of a process that are sockets, by their inodes."""
    files = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    files[int(target[8:-1])] = int(name)
    return files


def _stat(pid: int) -> list[str]:
    """What the kernel says about a process, from its state on."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _read(path: str) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
