"""A command in a process that is forked from a server which has imported torch; used like subprocess.Popen."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path

from rank_pool import forks

Main = Callable[[list[str]], int]


class ForkedCommand:
    def __init__(self, main: Main, words: list[str], *, cwd: Path, env: Mapping[str, str]):
        out, their_out = Pipe(duplex=False)
        err, their_err = Pipe(duplex=False)
        self._process = get_context(forks()).Process(
            target=_run, args=(main, words, str(cwd), dict(env), their_out, their_err)
        )
        self._process.start()
        their_out.close()
        their_err.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(c.fileno()), errors="replace") for c in (out, err))
        out.close()
        err.close()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        end = None if timeout is None else time.monotonic() + timeout
        texts = ["", ""]

        def read(i: int) -> None:
            file = (self.stdout, self.stderr)[i]
            if not file.closed:
                texts[i] = file.read()
                file.close()

        readers = [threading.Thread(target=read, args=(i,), daemon=True) for i in (0, 1)]
        for reader in readers:
            reader.start()
        for waited in (*readers, self._process):
            waited.join(None if end is None else max(end - time.monotonic(), 0))
        if any(reader.is_alive() for reader in readers) or self.poll() is None:
            raise subprocess.TimeoutExpired("fleetrun", timeout or 0)
        return texts[0], texts[1]


def _run(main: Main, words: list[str], cwd: str, env: dict[str, str], out: Connection, err: Connection) -> None:
    """As Python runs a command."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    for i, fd in enumerate((nothing, out.fileno(), err.fileno())):
        os.dup2(fd, i)
    for passed in (out, err):
        passed.close()
    os.close(nothing)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(fd, mode, closefd=False) for fd, mode in enumerate("rww"))
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    code: object = 1
    try:
        code = main(words)
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        try:
            file.flush()
        except OSError:
            code = code or 120
    if isinstance(code, str):
        os.write(2, f"{code}\n".encode())
    os._exit(code if isinstance(code, int) else int(code is not None))
