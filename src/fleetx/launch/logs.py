"""workerlog.N, one file a worker, and the echo of worker 0 to the terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import threading
import time
from pathlib import Path

from fleetx.errors import LaunchError
from fleetx.launch.job import Job

ECHO_EVERY = 0.02  # seconds; a read that finds nothing costs microseconds


class Logs:
    """The log directory of one run: fresh files, held so that no second fleetrun writes into them."""

    def __init__(self, job: Job):
        self.directory = job.log_dir
        self._workers = job.workers
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if not self._hold():
                if job.alone:
                    raise LaunchError(
                        f"--log_dir {job.log_dir}: another fleetrun is writing there; name another directory"
                    )
                # The nodes share a file system (or this is a rehearsal on one machine).
                self.directory = job.log_dir / f"node{job.rank}"
                self.directory.mkdir(exist_ok=True)
            for old in self.directory.glob("workerlog.*"):
                if old.suffix[1:].isdigit():
                    old.unlink()
            for local_rank in range(job.workers):
                self.path(local_rank).touch()
        except OSError as error:
            raise LaunchError(f"--log_dir {job.log_dir}: cannot write there ({error.strerror})") from None

    def path(self, local_rank: int) -> Path:
        return self.directory / f"workerlog.{local_rank}"

    def separate(self, title: str) -> None:
        """Mark in every file where a new attempt begins."""
        for local_rank in range(self._workers):
            with self.path(local_rank).open("a") as file:
                file.write(f"\n-------- fleetrun: {title}, {time.strftime('%Y-%m-%d %H:%M:%S')} --------\n")

    def _hold(self) -> bool:
        # The lock is on the directory itself: it leaves no file, and the kernel lifts it however this process ends.
        self._descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # a file system without locks
        return True


def tail(path: Path, *, lines: int) -> list[str]:
    """The last lines of a log, however long it is."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 200 * lines))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


class Echo:
    """Copies what is appended to a file to stdout, as it comes, until `stop`."""

    def __init__(self, path: Path):
        self._path = path
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="echo", daemon=True)
        self._thread.start()

    def stop(self, *, seconds: float | None = None) -> None:
        """Copy what is left, then end; give up after `seconds`, for nobody may be reading."""
        self._end.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        with self._path.open("rb") as file:
            while True:
                last = self._end.is_set()  # before the read: what is written after it is read once more
                while data := file.read(1 << 16):
                    if not _write(data):
                        return
                if last:
                    return
                self._end.wait(ECHO_EVERY)


def _write(data: bytes) -> bool:
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:  # `fleetrun ... | head`: nobody listens any more; the training goes on, as do the logs
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True
