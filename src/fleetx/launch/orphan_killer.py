"""A small process that waits for fleetrun to end and, if fleetrun was killed, kills everything it had started.

If fleetrun dies, the kernel kills its workers (see runner.py), but not their children, such as data loader processes.
The orphan killer reads from a pipe that closes when fleetrun ends, for whatever reason, and then acts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

MARK = "TORCHELASTIC_ERROR_FILE"


class OrphanKiller:
    """Kills the registered process groups if this process dies before `dismiss`.

    `directory` is for the error files of the workers, and is removed at the end.

    The orphan killer is a fork. If torch is already loaded (as in `fleetx plan`), its OpenMP threads do not exist in
    the child, so a parallel torch operation there could hang. The child never calls torch, so this does not matter.
    """

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="fleetrun-"))
        read_end, self._pipe = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            with contextlib.suppress(BaseException):
                _watch(read_end, self.directory)
            os._exit(0)
        os.close(read_end)

    def mark(self, name: str) -> dict[str, str]:
        """The environment variable that marks processes of this run; for a worker, also the path of its error file."""
        return {MARK: str(self.directory / name)}

    def register(self, groups: Iterable[int]) -> None:
        self._send("+", groups)

    def unregister(self, groups: Iterable[int]) -> None:
        self._send("-", groups)

    def dismiss(self) -> None:
        self._send(".", [0])
        os.close(self._pipe)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _send(self, sign: str, groups: Iterable[int]) -> None:
        with contextlib.suppress(BrokenPipeError):  # the orphan killer was killed; the kernel still kills the workers
            for group in groups:
                os.write(self._pipe, f"{sign}{group}\n".encode())


def _watch(read_end: int, directory: Path) -> None:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(name, signal.SIG_IGN)
    os.setsid()
    # Close our copies of fleetrun's output, whose readers would wait for us, and of the pipe's write end.
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    pipe = os.dup2(read_end, 3) if read_end != 3 else 3
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
    while orphans := _descendants(directory):  # they may have left their group; repeat to catch new ones
        for process in orphans:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.02)
    shutil.rmtree(directory, ignore_errors=True)


def _descendants(directory: Path) -> list[int]:
    """Processes that inherited a worker's environment, recognized by its error file in `directory`."""
    mark = f"{MARK}={directory}/".encode()
    processes = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        with contextlib.suppress(OSError):
            if name.isdigit():
                with open(f"/proc/{name}/environ", "rb") as file:
                    if mark in file.read():
                        processes.append(int(name))
    return processes
