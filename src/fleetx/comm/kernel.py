"""What the kernel knows about a process: is it alive, is it stopped, to which ports is it connected? No torch here.

Without /proc, nothing is known: no process counts as stopped, and no port as connected.
"""

import contextlib
import os
import select
import socket
import struct
from collections.abc import Mapping
from typing import Any

# Offset of tcpi_bytes_sent in Linux's struct tcp_info; tcpi_bytes_retrans, the bytes that were resent, follows.
_BYTES_SENT = 200


def readable(files: Any, seconds: float) -> list[Any]:
    """The files (descriptors, or objects that have one) that become readable within `seconds`."""
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
    """Is the process that started this one still alive? file: its pidfd, if there is one."""
    return os.getppid() == pid if file is None else not readable([file], 0)


def stopped(pid: int) -> bool:
    """Is the process stopped, by a signal or a debugger?"""
    return _stat(pid)[:1] in (["T"], ["t"])


def cpu_seconds(pid: int) -> float | None:
    """CPU time of the process, over all its threads; None if it is not known."""
    user_and_system = _stat(pid)[11:13]
    return sum(map(int, user_and_system)) / os.sysconf("SC_CLK_TCK") if user_and_system else None


def queued(pid: int) -> bool:
    """Does the process have bytes to send or to read over TCP?"""
    return any(queues != "00000000:00000000" for *_, queues in _sockets(pid))


def memory_kills() -> int:
    """How many processes the kernel has killed for lack of memory."""
    lines = _read("/proc/vmstat").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def listening(pid: int) -> list[int]:
    """The ports on which a process listens on a single address, not on all of them, as gloo does."""
    found = _sockets(pid)
    return sorted({port for _, state, host, port, _, _ in found if state == "0A" and int(host, 16)})


def connections() -> list[tuple[int, int, int]]:
    """(file descriptor, local port, remote port) of the TCP connections of this process."""
    return [(file, local, remote) for file, state, _, local, remote, _ in _sockets(os.getpid()) if state != "0A"]


def tcp_files() -> dict[int, int]:
    """The file descriptors of the TCP connections of this process, by inode."""
    found: dict[int, int] = {}
    for inode, file in socket_files(os.getpid()).items():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file)) as connection:  # it may be closed by now
            if connection.type == socket.SOCK_STREAM and connection.family != socket.AF_UNIX:
                found[inode] = file
    return found


def bytes_sent(files: Mapping[int, int] | None = None) -> dict[int, int]:
    """Bytes that this process has sent over each of its open TCP connections, as the kernel counts them.

    files: count only these, found by `tcp_files`; finding them takes most of the time.
    """
    found: dict[int, int] = {}
    for inode, file in (tcp_files() if files is None else files).items():
        try:
            if os.fstat(file).st_ino != inode:  # closed, and its descriptor was reused
                continue
            connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=file)
            try:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            finally:
                connection.detach()  # the file is not ours to close
        except OSError:
            continue
        sent, again = struct.unpack_from("QQ", info, _BYTES_SENT)
        found[inode] = sent - again  # on a busy machine, even loopback resends some
    return found


def socket_files(pid: int) -> dict[int, int]:
    """The file descriptors of a process that are sockets, by inode."""
    files = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed by now
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                if target.startswith("socket:["):
                    files[int(target[8:-1])] = int(name)
    return files


def _sockets(pid: int) -> list[tuple[int, str, str, int, int, str]]:
    """(file descriptor, state, local host, local port, remote port, "tx:rx" queues) of a process's TCP sockets."""
    files, found = socket_files(pid), []
    for table in ("tcp", "tcp6"):
        for line in _read(f"/proc/{pid}/net/{table}").splitlines()[1:]:
            fields = line.split()
            inode = int(fields[9])
            if inode in files:
                (host, _, local), remote = fields[1].rpartition(":"), fields[2].rpartition(":")[2]
                found.append((files[inode], fields[3], host, int(local, 16), int(remote, 16), fields[4]))
    return found


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat, starting with the state."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _read(path: str) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""
