"""fleetrun's side of the fork server: start it in the background, and ask it for workers."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from fleetx.launch import fork_server

ANSWER_TIMEOUT = 5.0  # seconds; a fork takes about ten milliseconds


class ForkServer:
    """Forks workers once it is ready. It dies with fleetrun, and `fork` returns None if it cannot be used."""

    def __init__(self, *, environ: Mapping[str, str], modules: Sequence[str]):
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(ANSWER_TIMEOUT)
        descriptor = theirs.fileno()
        command = [sys.executable, "-u", fork_server.__file__, str(os.getpid()), str(descriptor), *modules]
        with theirs:
            self._process = subprocess.Popen(
                command,
                env=environ,
                pass_fds=[descriptor],
                start_new_session=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self.pid = self._process.pid
        self.refusal: str | None = None  # why it will never fork
        self._answered = False

    def alive(self) -> bool:
        return self._process.poll() is None

    def ready(self) -> bool:
        """Whether the server can fork. Never blocks."""
        if not self._answered and select.select([self._connection], [], [], 0)[0]:
            with contextlib.suppress(EOFError, OSError):
                self.refusal = fork_server.receive(self._connection)["why_not"]
                self._answered = True
        return self._answered and self.refusal is None and self.alive()

    def fork(self, command: Sequence[str], *, environ: Mapping[str, str]) -> Forked | None:
        """A worker that runs `runner.py COMMAND`, as a child of this process."""
        try:
            fork_server.send(self._connection, {"environ": dict(environ), "command": list(command)})
            return Forked(fork_server.receive(self._connection)["pid"])
        except (EOFError, OSError):
            self.end()  # it was killed, or stopped
            return None

    def end(self) -> None:
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()


class Forked:
    """A child process that subprocess did not start, with the part of Popen's interface that is needed here."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            except ChildProcessError:
                self.returncode = 255  # something else has reaped it
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            time.sleep(0.005)
        return self.returncode  # type: ignore[return-value]
