"""The worker processes of one attempt: start them, notice which exits first, stop them, leave nothing running."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fleetx.errors import LaunchError
from fleetx.launch.environment import worker_environment
from fleetx.launch.job import Attempt, Job
from fleetx.launch.logs import Logs
from fleetx.launch.orphan_killer import OrphanKiller
from fleetx.launch.warm import Forked, ForkServer

RUNNER = Path(__file__).with_name("runner.py")
KILL_TIMEOUT = 5.0  # seconds to wait after SIGKILL: a process inside a driver call may not react even to that


def adopt_orphans() -> None:
    """Make the kernel reparent the orphans of our workers to us instead of init, so that we can find and kill them."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


class Worker:
    """One process, the leader of its own group. `proc` and `close` make it a SubprocessHandler of torchelastic."""

    def __init__(self, process: subprocess.Popen[bytes] | Forked, *, local_rank: int, error_file: Path):
        self.proc = process
        self.local_rank = local_rank
        self.error_file = error_file  # written by torchelastic's `@record`, if the user's script uses it
        self.record = error_file.with_name(f"{error_file.name}.last")  # written by the runner
        self.exit_code: int | None = None  # as in subprocess: -9 for SIGKILL
        self.exit_time = 0.0
        self.failing_since: float | None = None
        try:
            self.pidfd: int | None = os.pidfd_open(self.proc.pid)
        except (AttributeError, OSError):
            self.pidfd = None  # an old kernel: LocalWorkers.wait polls instead

    def close(self, death_sig: signal.Signals | None = None) -> None:
        with contextlib.suppress(ProcessLookupError):
            if death_sig == signal.SIGKILL:
                os.killpg(self.proc.pid, signal.SIGKILL)
                return
            # Spare its children: without its data loaders it could not save its state.
            os.kill(self.proc.pid, death_sig or signal.SIGTERM)
            # A process stopped by SIGSTOP does not handle other signals, and would use up the whole --stop_timeout.
            os.kill(self.proc.pid, signal.SIGCONT)

    def poll(self) -> bool:
        """Whether it has exited. The first call to notice records the time."""
        if self.exit_code is None and (code := self.proc.poll()) is not None:
            self.exit_code, self.exit_time = code, time.time()
            if self.pidfd is not None:
                os.close(self.pidfd)
        return self.exit_code is not None


@dataclass(kw_only=True, eq=False)
class LocalWorkers:
    """All workers of one attempt on this node."""

    job: Job
    attempt: Attempt
    logs: Logs
    killer: OrphanKiller
    environ: Mapping[str, str]
    helpers: set[int]  # fleetrun's own processes: neither workers nor leftovers of workers
    server: ForkServer | None
    stopped_at: float | None = None  # when we began to stop them: a later exit is not the cause
    killed: int = 0  # workers that did not exit in time

    def __post_init__(self) -> None:
        self.warm = self.server is not None and self.server.ready()
        self._workers: list[Worker] = []

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def start(self) -> None:
        self._started = time.monotonic()
        number = self.attempt.number
        if number:
            size = f", {len(self.attempt.endpoints)} workers" if self.job.elastic else ""
            self.logs.write_separator(f"restart {self.attempt.restarts} of {self.job.max_restarts}{size}")
        for local_rank in range(len(self.attempt.slots)):
            error_file = self.killer.directory / f"{number}-{local_rank}.json"
            variables = worker_environment(
                self.job, attempt=self.attempt, local_rank=local_rank, error_file=error_file, environ=self.environ
            )
            log = str(self.logs.path(local_rank).resolve())
            kind = "module" if self.job.module else "script"
            command = [str(os.getpid()), log, kind, self.job.target, *self.job.arguments]
            process = self._fork(command, variables) or self._popen(command, variables)
            self.killer.register([process.pid])
            self._workers.append(Worker(process, local_rank=local_rank, error_file=error_file))

    def _fork(self, command: list[str], variables: Mapping[str, str]) -> Forked | None:
        if not self.warm or self.server is None:
            return None
        forked = self.server.fork(command, environ=variables)
        if forked is None:
            self.warm = False
            self._kill_others()  # the server may have forked without answering
        return forked

    @staticmethod
    def _popen(command: list[str], variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        try:
            words = [sys.executable, "-u", str(RUNNER), *command]
            return subprocess.Popen(words, env=variables, start_new_session=True)
        except OSError as error:
            raise LaunchError(f"cannot start a worker ({error.strerror})") from None

    def life(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def alive(self) -> list[Worker]:
        return [worker for worker in self if not worker.poll()]

    def wait(self, seconds: float) -> None:
        """Return when a worker exits, or after `seconds`; immediately if one exited since the last call."""
        deadline = time.monotonic() + seconds
        running = [worker for worker in self if worker.exit_code is None]
        pidfds = [worker.pidfd for worker in running if worker.pidfd is not None]
        if running and len(pidfds) == len(running):
            poller = select.poll()
            for pidfd in pidfds:
                poller.register(pidfd, select.POLLIN)
            poller.poll(seconds * 1000)
        else:
            while all(worker.proc.poll() is None for worker in running) and time.monotonic() < deadline:
                time.sleep(min(0.02, seconds))
        for worker in running:
            worker.poll()
        self._reap_adopted()
        self._kill_hanging()

    def stop(self, death_sig: signal.Signals, *, seconds: float, tick: Callable[[], None] = lambda: None) -> None:
        """Send `death_sig` to all, wait `seconds`, then kill what is left and everything the workers had started.

        If all workers have succeeded, this is a no-op: what their scripts left running was left on purpose.
        """
        alive = self.alive()
        if not alive and self.stopped_at is None and all(worker.exit_code == 0 for worker in self):
            return
        self.stopped_at = self.stopped_at or time.time()
        for worker in alive:
            worker.close(death_sig)
        self._wait_for_all(seconds, tick=tick)
        self.killed += len(self.alive())  # a second call finds nobody alive
        self.kill()

    def kill(self) -> None:
        for worker in self.alive():
            worker.close(signal.SIGKILL)
        self._wait_for_all(KILL_TIMEOUT)
        self._kill_others()
        self.killer.unregister(worker.proc.pid for worker in self)

    def _wait_for_all(self, seconds: float, *, tick: Callable[[], None] = lambda: None) -> None:
        deadline = time.monotonic() + seconds
        while self.alive() and (left := deadline - time.monotonic()) > 0:
            self.wait(min(left, 0.1))
            tick()

    def _kill_hanging(self) -> None:
        """Kill workers whose main thread raised long ago: the process may be waiting forever for another thread."""
        for worker in self:
            if worker.exit_code is None and worker.record.exists():
                worker.failing_since = worker.failing_since or time.monotonic()
                if time.monotonic() - worker.failing_since > self.job.stop_timeout:
                    worker.close(signal.SIGKILL)

    def _kill_others(self) -> None:
        """Kill all processes below this one that are neither running workers nor our own helpers."""
        kill_descendants(exclude={*self.helpers, *(worker.proc.pid for worker in self.alive())})

    def _reap_adopted(self) -> None:
        """Wait for adopted orphans that have exited, which would otherwise stay zombies."""
        ours = {worker.proc.pid for worker in self} | self.helpers
        with contextlib.suppress(ChildProcessError):
            while (child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and child.si_pid not in ours:
                os.waitpid(child.si_pid, 0)


def kill_descendants(*, exclude: set[int]) -> None:
    """Kill every process below this one, including children of workers that left their group."""
    import psutil  # takes 25 ms, and only a failed run needs it

    for _ in range(3):  # a process may be started during the first pass
        found = [process for process in psutil.Process().children(recursive=True) if process.pid not in exclude]
        if not found:
            return
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=KILL_TIMEOUT)
