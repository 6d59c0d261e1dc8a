"""The processes of one attempt: start them, see which ends first, stop them, leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fleetx.errors import LaunchError
from fleetx.launch import environment
from fleetx.launch.job import Job, World
from fleetx.launch.logs import Logs
from fleetx.launch.orphan_killer import Guard

RUNNER = Path(__file__).with_name("runner.py")
LAST_WORD = 5.0  # seconds to wait for what was killed with SIGKILL: a process in a driver may not hear even that


def adopt_orphans() -> None:
    """Make the kernel hand the orphans of our workers to us instead of to init, so that we can find and end them."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


@dataclass(frozen=True, kw_only=True)
class End:
    """How and when a worker ended."""

    exit_code: int  # as subprocess has it: -9 for SIGKILL
    time: float


class Worker:
    """One process, leader of a group of its own. torchelastic calls this a SubprocessHandler: `proc` and `close`."""

    def __init__(self, job: Job, *, local_rank: int, variables: Mapping[str, str], log: Path, error_file: Path):
        self.local_rank = local_rank
        self.error_file = error_file  # torchelastic's, for the user's own `@record`
        self.record = error_file.with_name(f"{error_file.name}.last")  # the runner's: what ended the script
        self.end: End | None = None
        self.failing_since: float | None = None
        kind = "module" if job.module else "script"
        runner = [sys.executable, "-u", str(RUNNER), str(os.getpid()), str(log.resolve()), kind]
        try:
            self.proc = subprocess.Popen([*runner, job.target, *job.arguments], env=variables, start_new_session=True)
        except OSError as error:
            raise LaunchError(f"worker {local_rank} could not be started ({error.strerror})") from None
        try:
            self.descriptor: int | None = os.pidfd_open(self.proc.pid)
        except (AttributeError, OSError):
            self.descriptor = None  # an old kernel: `Crew.wait` looks often instead

    def close(self, death_sig: signal.Signals | None = None) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.proc.pid, death_sig or signal.SIGTERM)
            # A stopped process takes no other signal; without this it would cost the whole grace.
            os.killpg(self.proc.pid, signal.SIGCONT)

    def look(self) -> bool:
        """Whether it has ended; the first look that finds so remembers when."""
        if self.end is None and (code := self.proc.poll()) is not None:
            self.end = End(exit_code=code, time=time.time())
            if self.descriptor is not None:
                os.close(self.descriptor)
        return self.end is not None


class Crew:
    """All workers of one attempt on this node."""

    def __init__(self, job: Job, *, world: World, logs: Logs, errors: Path, guard: Guard, given: Mapping[str, str]):
        self.job = job
        self.world = world
        self.stopped_at: float | None = None  # when we began to stop them: what ends later is no cause
        self.workers: list[Worker] = []
        self._logs, self._errors, self._guard, self._given = logs, errors, guard, given

    def start(self) -> None:
        if self.world.attempt:
            self._logs.separate(f"restart {self.world.attempt} of {self.job.max_restarts}")
        for local_rank in range(self.job.workers):
            error_file = self._errors / f"{self.world.attempt}-{local_rank}.json"
            variables = environment.of_worker(
                self.job, world=self.world, local_rank=local_rank, error_file=error_file, given=self._given
            )
            log = self._logs.path(local_rank)
            worker = Worker(self.job, local_rank=local_rank, variables=variables, log=log, error_file=error_file)
            self._guard.protect([worker.proc.pid])
            self.workers.append(worker)

    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.look()]

    def wait(self, seconds: float) -> None:
        """Return when a worker ends, or after `seconds`. At once if one ended that nobody has looked at yet."""
        deadline = time.monotonic() + seconds
        running = [worker for worker in self.workers if worker.end is None]
        descriptors = [worker.descriptor for worker in running if worker.descriptor is not None]
        if running and len(descriptors) == len(running):
            poller = select.poll()
            for descriptor in descriptors:
                poller.register(descriptor, select.POLLIN)
            poller.poll(seconds * 1000)
        else:
            while all(worker.proc.poll() is None for worker in running) and time.monotonic() < deadline:
                time.sleep(min(0.02, seconds))
        for worker in running:
            worker.look()
        self._bury_the_adopted()
        self._end_the_failing()

    def stop(self, death_sig: signal.Signals, *, seconds: float) -> None:
        """Ask all to end, give them `seconds`, kill the rest, and then whatever they had started themselves.

        A crew that has succeeded is left alone, and so is what its scripts left running on purpose.
        """
        alive = self.alive()
        if (
            not alive
            and self.stopped_at is None
            and all(worker.end and worker.end.exit_code == 0 for worker in self.workers)
        ):
            return
        self.stopped_at = self.stopped_at or time.time()
        for worker in alive:
            worker.close(death_sig)
        self._wait_for_all(seconds)
        self.kill()

    def kill(self) -> None:
        for worker in self.alive():
            worker.close(signal.SIGKILL)
        self._wait_for_all(LAST_WORD)
        kill_descendants(spare={self._guard.pid, *(worker.proc.pid for worker in self.alive())})
        self._guard.release(worker.proc.pid for worker in self.workers)

    def _wait_for_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.alive() and (left := deadline - time.monotonic()) > 0:
            self.wait(min(left, 0.1))

    def _end_the_failing(self) -> None:
        """A main thread that raised may leave its process waiting for some other thread, for ever."""
        for worker in self.workers:
            if worker.end is None and worker.record.exists():
                worker.failing_since = worker.failing_since or time.monotonic()
                if time.monotonic() - worker.failing_since > self.job.stop_timeout:
                    worker.close(signal.SIGKILL)

    def _bury_the_adopted(self) -> None:
        """Orphans that end while the workers still run would stay zombies: nobody else waits for them."""
        mine = {worker.proc.pid for worker in self.workers} | {self._guard.pid}
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and found.si_pid not in mine:
                os.waitpid(found.si_pid, 0)


def kill_descendants(*, spare: set[int]) -> None:
    """Kill every process below this one except `spare`: children of workers, also those that left their group."""
    import psutil  # 25 ms that only the end of a failed run pays

    for _ in range(3):  # one that was being born during the first round
        left = [process for process in psutil.Process().children(recursive=True) if process.pid not in spare]
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=LAST_WORD)
