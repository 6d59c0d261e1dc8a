"""fleetrun as a real process, with everything that it started found again by a mark in its environment."""

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
from dataclasses import dataclass, field
from pathlib import Path

import fleetx

SECONDS = 60  # for one run; a loaded machine takes several times the usual two
COMMAND = [sys.executable, "-m", "fleetx.launch"]
PACKAGES = str(Path(fleetx.__file__).parents[1])


@dataclass
class Fleetrun:
    """One run, in a directory of its own."""

    where: Path
    process: subprocess.Popen[str]
    mark: str
    born: float = field(default_factory=time.monotonic)
    out: str = ""
    err: str = ""
    seconds: float = 0.0

    @property
    def code(self) -> int:
        return self.process.returncode

    def finish(self) -> Fleetrun:
        try:
            self.out, self.err = self.process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self.destroy()
            raise
        self.seconds = time.monotonic() - self.born
        return self

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_for(self, name: str) -> str:
        """The text of a file that some worker writes (whole, in one go)."""
        path = self.where / name
        until(lambda: path.exists() and path.read_text().endswith("\n"), what=f"{name} to be written")
        return path.read_text()

    def wait_for_the_agent(self) -> None:
        """Until torchelastic has taken over: its store has a thread of its own, and the signals come next."""
        until(lambda: any("tcpstore" in name for name in self._threads()), what="the agent's store")
        time.sleep(0.3)

    def _threads(self) -> list[str]:
        names = []
        for thread in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it ended meanwhile
                names.append((thread / "comm").read_text())
        return names

    def log(self, number: int) -> str:
        return (self.where / "log" / f"workerlog.{number}").read_text()

    def survivors(self) -> list[int]:
        """Every process that still has the mark, except zombies, whose environment is gone."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it ended meanwhile, or it is not ours
                if entry.name.isdigit() and self.mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found

    def destroy(self) -> None:
        for pid in self.survivors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


def start(where: Path, script: str, *, options: str = "", arguments: str = "", **variables: str) -> Fleetrun:
    """fleetrun OPTIONS train.py ARGUMENTS in the directory `where`, on the CPU unless `options` say otherwise."""
    where.mkdir(parents=True, exist_ok=True)
    (where / "train.py").write_text(textwrap.dedent(script))
    device = [] if "--device" in options or "--gpus" in options else ["--device", "cpu"]
    target = [] if "-m" in options.split() else ["train.py"]
    return launch(where, [*device, *options.split(), *target, *arguments.split()], **variables)


def launch(where: Path, words: list[str], **variables: str) -> Fleetrun:
    mark = f"FLEETX_TEST={uuid.uuid4().hex}"
    inherited = {k: v for k, v in os.environ.items() if k not in ("FLEETX_DEVICE", "OMP_NUM_THREADS")}
    process = subprocess.Popen(
        [*COMMAND, *words],
        cwd=where,
        env={**inherited, "PYTHONPATH": PACKAGES, "FLEETX_TEST": mark.partition("=")[2], **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
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
