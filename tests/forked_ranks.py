"""Ranks that a test may kill, stop or lose: forked, because starting Python with torch takes seconds."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing.process
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401 -- the first optimizer would import it, in every child


class Forked:
    """n processes with the environment of a launcher. Their output goes to files."""

    def __init__(self, folder: Path, size: int, job: Callable[..., Any], *args: Any, env: list[dict] | None = None):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.folder, self.codes = folder, dict[int, int]()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pids = [self._fork(rank, size, job, args, (env or [{}] * size)[rank]) for rank in range(size)]

    def _fork(self, rank, size, job, args, env):
        pid = os.fork()
        if pid:
            return pid
        gc.freeze()  # collections do not copy the pages of what the parent has imported
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)} | env
        out = os.open(self.folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout, sys.stderr = (os.fdopen(file, "w", buffering=1, closefd=False) for file in (1, 2))
        faulthandler.disable()  # pytest's would write to its own output
        multiprocessing.process._children.clear()  # the ranks of the pools, which this process would end when it ends
        # In a thread without OpenMP's pool, which does not survive a fork. It takes the place of the main thread.
        thread = threading.Thread(target=_work, args=(job, args))
        threading.main_thread = lambda: thread
        thread.start()
        thread.join()
        os._exit(1)

    def log(self, rank: int) -> str:
        path = self.folder / f"{rank}.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, text: str, rank: int, seconds: float = 120) -> None:
        _until(lambda: text in self.log(rank), seconds, lambda: f"no {text!r} in:\n{self.log(rank)}")

    def wait(self, *ranks: int, seconds: float = 120) -> None:
        """Until these ranks have ended."""
        _until(
            lambda: all(self._ended(r) for r in ranks), seconds, lambda: "\n".join(map(self.log, range(len(self.pids))))
        )

    def _ended(self, rank: int) -> bool:
        if rank not in self.codes:
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if pid:
                self.codes[rank] = os.waitstatus_to_exitcode(status)
        return rank in self.codes

    def stop(self) -> None:
        for rank, pid in enumerate(self.pids):
            if not self._ended(rank):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _work(job: Callable[..., Any], args: Any) -> None:
    """As Python runs a script: an error that leaves it goes to the excepthook, then come the exit functions."""
    code = 0
    sys.excepthook = lambda *error: traceback.print_exception(*error)
    try:
        job(*args)
    except SystemExit as error:
        code = error.code or 0
    except BaseException as error:
        code = 1
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _until(done: Callable[[], bool], seconds: float, say: Callable[[], str]) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, say()
        time.sleep(0.02)


@contextmanager
def forked(folder: Path, size: int, job: Callable[..., Any], *args: Any, env: list[dict] | None = None):
    ranks = Forked(folder, size, job, *args, env=env)
    try:
        yield ranks
    finally:
        ranks.stop()
