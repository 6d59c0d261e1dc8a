"""workerlog.N, one file per worker, and the echo of worker 0 to the terminal."""

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

ECHO_EVERY = 0.02  # seconds; a read that finds nothing takes microseconds


class Logs:
    """The log directory of one run: empty files, locked so that a second fleetrun cannot write to them."""

    def __init__(self, job: Job):
        self.directory = job.log_dir
        self._workers = job.workers
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if not self._lock():
                if job.single_node:
                    raise LaunchError(
                        f"--log_dir {job.log_dir}: another fleetrun is using it; choose another directory"
                    )
                # The nodes share a file system, or all run on this machine.
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

    def write_separator(self, title: str) -> None:
        """Mark in every log where a new attempt begins, unless the disk is full. A script may have deleted its logs."""
        with contextlib.suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
        for local_rank in range(self._workers):
            with contextlib.suppress(OSError), self.path(local_rank).open("a") as file:
                file.write(f"\n-------- fleetrun: {title}, {time.strftime('%Y-%m-%d %H:%M:%S')} --------\n")

    def _lock(self) -> bool:
        # Locking the directory itself leaves no lock file, and the kernel unlocks it however this process ends.
        self._descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            pass  # this file system does not support locks
        return True


def tail(path: Path, *, lines: int) -> list[str]:
    """The last lines of a log, without reading all of it."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 200 * lines))
            return file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []


class Echo:
    """Copies a growing file to stdout until `stop`."""

    def __init__(self, path: Path):
        self._path = path
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="echo", daemon=True)
        self._thread.start()

    def stop(self, *, seconds: float | None = None) -> None:
        """Copy what is left, then end. Give up after `seconds`, because stdout may be blocked."""
        self._stopping.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        with self._path.open("rb") as file:
            while True:
                last = self._stopping.is_set()  # before the read, so that everything written before `stop` is copied
                while data := file.read(1 << 16):
                    if not _write(data):
                        return
                if last:
                    return
                self._stopping.wait(ECHO_EVERY)


def _write(data: bytes) -> bool:
    try:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:  # as in `fleetrun ... | head`: stop echoing, but keep training and logging
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return False
    return True
