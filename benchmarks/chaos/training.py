"""One training under fleetrun, seen from outside: its processes, its messages, its steps and its checkpoints."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos.marks import Mark, Marks, now

WORKER = Path(__file__).with_name("worker.py")
ROOT = Path(__file__).parents[2]
PATIENCE = 120.0  # seconds without any progress that are a hang; much more than a busy machine needs
ORPHANS = 10.0  # seconds after which a process that should be gone is an orphan
KINDS = ("merge", "localsgd", "background")


@dataclass(frozen=True)
class Line:
    """What a worker logged."""

    what: str
    step: int
    loss: str
    digest: str
    time: float


def fleetrun(words: list[str], *, prefix: Sequence[str], cwd: Path, env: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "fleetx.launch", *words], env=env, cwd=cwd, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True,
    )  # fmt: skip


@dataclass
class Training:
    """`kind`, `steps` ...: see worker.py. `prefix`: a command that starts fleetrun, such as `unshare -n`."""

    folder: Path
    kind: str = "merge"
    steps: int = 400
    every: int = 5
    width: int = 32
    ranks: int = 2
    restarts: int = 1_000_000
    prefix: Sequence[str] = ()
    options: Sequence[str] = ()
    messages: list[tuple[float, str]] = field(default_factory=list)  # of fleetrun, with their time
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(self) -> Training:
        self.folder.mkdir(parents=True, exist_ok=True)
        for rank in range(self.ranks):
            (self.folder / f"marks-{rank}").touch()
        self.marks = [Marks(self.folder, rank) for rank in range(self.ranks)]
        launch = ["--device", "cpu", "--nproc_per_node", self.ranks, "--log_dir", self.folder / "log"]
        if self.restarts:
            launch += ["--max_restarts", self.restarts, "--restart_delay", 0, "--preload", "fleetx.data.arrays"]
        script = [WORKER, self.folder, self.kind, self.steps, self.every, self.width]
        words = [str(word) for word in [*launch, *self.options, *script]]
        path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        environment = os.environ | {"PYTHONPATH": path, "CHAOS_MARK": self.mark, "OMP_NUM_THREADS": "1"}
        self.process = fleetrun(words, prefix=self.prefix, cwd=self.folder, env=environment)
        self._listener = threading.Thread(target=self._listen, args=(self.process.stderr,), daemon=True)
        self._listener.start()
        return self

    def _listen(self, stream: Any) -> None:
        with stream:
            for line in stream:
                self.messages.append((now(), line.rstrip()))

    # --- what it does -----------------------------------------------------------------------------
    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def read(self, rank: int) -> Mark:
        return self.marks[rank].read()

    def lines(self, rank: int) -> list[Line]:
        path = self.folder / f"log-{rank}"
        found = [text.split(" ") for text in path.read_text().splitlines()] if path.exists() else []
        return [Line(what, int(step), loss, digest, float(at)) for what, step, loss, digest, at in found]

    def committed(self) -> int:
        """The step of the newest checkpoint."""
        names = [p.name for p in (self.folder / "run").glob("step-*")]
        return max((int(name.removeprefix("step-")) for name in names), default=0)

    def wait(self, until: Callable[[], bool], *, pause: float = 0.002, seconds: float = PATIENCE) -> bool:
        """Whether it happened before fleetrun ended. TimeoutError if nothing happened at all for `seconds`."""
        seen, since = self._progress(), now()
        while not until():
            if not self.running:
                return until()
            if (progress := self._progress()) != seen:
                seen, since = progress, now()
            if now() - since > seconds:
                raise TimeoutError(f"no progress for {seconds:g} s in {self.kind}: {[m.read() for m in self.marks]}")
            time.sleep(pause)
        return True

    def _progress(self) -> list[Mark]:
        return [marks.read() for marks in self.marks]

    def finish(self) -> int:
        """The exit code of fleetrun."""
        self.wait(lambda: not self.running, pause=0.02)
        return self.process.wait()

    # --- its processes ----------------------------------------------------------------------------
    def processes(self) -> list[int]:
        """Everything that carries the mark of this training."""
        found, mine = [], f"CHAOS_MARK={self.mark}".encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and mine in (entry / "environ").read_bytes() and not _zombie(entry):
                    found.append(int(entry.name))
        return found

    def orphans(self) -> list[int]:
        """What is still there some time after fleetrun has gone."""
        deadline = now() + ORPHANS
        while (left := self.processes()) and now() < deadline:
            time.sleep(0.02)
        return left

    def destroy(self) -> None:
        """Leave nothing running."""
        for pid in [*self.processes(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._listener.join(10)


def _zombie(entry: Path) -> bool:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"


def kill(*pids: int) -> float:
    """SIGKILL to all at once; when."""
    at = now()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return at


def reference(folder: Path, **settings: Any) -> list[dict[int, Line]]:
    """By rank: the steps of an unbroken run, and its start as step 0."""
    training = Training(folder, restarts=0, **settings).start()
    try:
        code = training.finish()
        if code:
            raise RuntimeError("the unbroken run failed:\n" + "\n".join(text for _, text in training.messages))
        return [
            {line.step: line for line in training.lines(rank) if line.what in ("resumed", "step")}
            for rank in range(training.ranks)
        ]
    finally:
        training.destroy()


def differences(training: Training, unbroken: list[dict[int, Line]]) -> list[str]:
    """Lines that an unbroken run does not have."""
    wrong = []
    for rank in range(training.ranks):
        for line in training.lines(rank):
            same = unbroken[rank].get(line.step)
            if same is None or line.digest != same.digest or (line.what == "step" and line.loss != same.loss):
                wrong.append(f"rank {rank}: {line.what} {line.step}: {line.loss} {line.digest}")
    return wrong


def disagreements(training: Training) -> list[str]:
    """Steps that were done twice, before and after a restart, with other results; for runs without an unbroken one."""
    wrong = []
    for rank in range(training.ranks):
        first: dict[int, Line] = {}
        for line in training.lines(rank):
            if line.what == "end":
                continue
            same = first.setdefault(line.step, line)
            if line.digest != same.digest:
                wrong.append(f"rank {rank}: {line.what} {line.step}: {line.digest}, before: {same.digest}")
    return wrong
