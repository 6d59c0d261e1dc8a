"""Start fleetrun as a real process. A mark in the environment finds everything that it started.

It is a fork of a server that has imported torch (`forked_command.py`), which takes two seconds. Tests that
say `cold=True` start a new process, as a user does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import fleetx.launch
from forked_command import ForkedCommand

SECONDS = 150  # limit for one run, which takes two seconds on an idle machine and much longer on a busy one
COMMAND = [sys.executable, "-m", "fleetx.launch"]
PACKAGES = str(Path(fleetx.__file__).parents[1])


@dataclass
class Fleetrun:
    """One run, in its own directory."""

    where: Path
    process: subprocess.Popen[str] | ForkedCommand
    mark: str
    out: str = ""
    err: str = ""

    @property
    def code(self) -> int:
        return self.process.returncode

    def finish(self) -> Fleetrun:
        try:
            self.out, self.err = self.process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self.destroy()
            raise
        return self

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_for(self, name: str) -> str:
        """Wait for a file that a worker writes, ending in a newline, and return its text."""
        path = self.where / name
        until(lambda: path.exists() and path.read_text().endswith("\n"), what=f"{name} to be written")
        return path.read_text()

    def wait_for_the_agent(self) -> None:
        """Wait until torchelastic has taken over: its store has its own thread, and its signal handlers come next.

        Tests pass whichever handlers get a signal; the pause only makes it likely that these do.
        """
        until(lambda: any("tcpstore" in name for name in self._threads()), what="the agent's store")
        time.sleep(0.3)

    def _threads(self) -> list[str]:
        names = []
        for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                names.append((thread / "comm").read_text())
        return names

    def log(self, number: int) -> str:
        return log_of(self.where, number)

    def survivors(self) -> list[int]:
        """Every process of this run."""
        return marked(self.mark)

    def ended(self) -> dict[str, str | int | None]:
        """What JSON can hold of it."""
        return {"folder": str(self.where), "mark": self.mark, "out": self.out, "err": self.err, "code": self.code}

    def destroy(self) -> None:
        for pid in self.survivors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@dataclass
class Ended:
    """A run that has ended, perhaps one of another process."""

    folder: str
    mark: str
    out: str
    err: str
    code: int

    @property
    def where(self) -> Path:
        return Path(self.folder)

    def log(self, number: int) -> str:
        return log_of(self.where, number)

    def survivors(self) -> list[int]:
        return marked(self.mark)


def log_of(where: Path, number: int) -> str:
    return (where / "log" / f"workerlog.{number}").read_text()


def marked(mark: str) -> list[int]:
    """Every process with the mark, except zombies, which have no environment."""
    pids = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has just ended, or is not ours
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes():
                pids.append(int(entry.name))
    return pids


def start(where: Path, script: str, *, options: str = "", arguments: str = "", **others) -> Fleetrun:
    """`fleetrun OPTIONS train.py ARGUMENTS` in the directory `where`, on the CPU unless OPTIONS say otherwise."""
    where.mkdir(parents=True, exist_ok=True)
    (where / "train.py").write_text(textwrap.dedent(script))
    device = [] if "--device" in options or "--gpus" in options else ["--device", "cpu"]
    target = [] if "-m" in options.split() else ["train.py"]
    return launch(where, [*device, *options.split(), *target, *arguments.split()], **others)


def launch(
    where: Path, words: list[str], *, cold: bool = False, stdout: int | None = None, **variables: str
) -> Fleetrun:
    mark = f"FLEETX_TEST={uuid.uuid4().hex}"
    inherited = {k: v for k, v in os.environ.items() if k not in ("FLEETX_DEVICE", "OMP_NUM_THREADS")}
    env = {**inherited, "PYTHONPATH": PACKAGES, "FLEETX_TEST": mark.partition("=")[2], **variables}
    if not cold and stdout is None:
        return Fleetrun(where, ForkedCommand(fleetx.launch.main, words, cwd=where, env=env), mark)
    process = subprocess.Popen(
        [*COMMAND, *words],
        cwd=where,
        env=env,
        stdout=subprocess.PIPE if stdout is None else stdout,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
    )
    return Fleetrun(where=where, process=process, mark=mark)


def until(condition, *, what: str, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
