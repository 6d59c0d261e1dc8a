"""A small process that waits for fleetrun to end and, if nobody could say goodbye, kills what fleetrun had started.

The kernel kills the workers of a fleetrun that dies (see runner.py), but not the workers' own children: data loaders
and the like would live on. The guard is forked before anything else happens, holds the reading end of a pipe, and
acts when the pipe closes, which is what every death of fleetrun has in common.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable


class Guard:
    """Knows the process groups that must not outlive this process, and a directory to remove."""

    def __init__(self, directory: str):
        reading, self._pipe = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            with contextlib.suppress(BaseException):
                _watch(reading, directory)
            os._exit(0)
        os.close(reading)

    def protect(self, groups: Iterable[int]) -> None:
        self._tell("+", groups)

    def release(self, groups: Iterable[int]) -> None:
        self._tell("-", groups)

    def dismiss(self) -> None:
        self._tell(".", [0])
        os.close(self._pipe)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _tell(self, sign: str, groups: Iterable[int]) -> None:
        with contextlib.suppress(BrokenPipeError):  # somebody killed the guard; the kernel still watches the workers
            for group in groups:
                os.write(self._pipe, f"{sign}{group}\n".encode())


def _watch(reading: int, directory: str) -> None:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(name, signal.SIG_IGN)
    os.setsid()
    # Whoever reads fleetrun's output to its end must not wait for the guard; nor may the guard hold its own pipe open.
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    pipe = os.dup2(reading, 3) if reading != 3 else 3
    os.closerange(4, 4096)

    groups: set[int] = set()
    with os.fdopen(pipe) as lines:
        for line in lines:
            sign, group = line[0], int(line[1:])
            if sign == ".":
                return
            (groups.add if sign == "+" else groups.discard)(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    while left := _heirs_of(directory):  # they may have left their group, and one may be born while we look
        for process in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
    import shutil

    shutil.rmtree(directory, ignore_errors=True)


def _heirs_of(directory: str) -> list[int]:
    """The processes that inherited a worker's environment, which names an error file in `directory`."""
    mark = f"TORCHELASTIC_ERROR_FILE={directory}/".encode()
    heirs = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        with contextlib.suppress(OSError):
            if name.isdigit():
                with open(f"/proc/{name}/environ", "rb") as file:
                    if mark in file.read():
                        heirs.append(int(name))
    return heirs
