"""Commands in processes forked from a server that has imported torch; the interface is that of subprocess.Popen.

A command that is fleetrun gets its workers in the same way, from fleetx's own fork server: importing torch would take
each of them two seconds, and its first step, which imports torch._dynamo, two more. launch/test_launch_warm.py shows
that a forked worker cannot be told from one that `python` has started, and how both start without any of this.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import multiprocessing.util
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe, forkserver, get_context, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import fleetx.launch
from fleetx import cli
from fleetx.launch import fork_server, runner, start, warm, workers
from forking import forks

TESTS = str(Path(__file__).parent)
Main = Callable[[list[str]], Any]


def fleetrun(words: Sequence[Any], *, cwd: Path, env: Mapping[str, str] | None = None, seconds: float = 280) -> Done:
    return run(fleetx.launch.main, words, cwd=cwd, env=env, seconds=seconds)


def fleetx_(words: Sequence[Any], *, cwd: Path, env: Mapping[str, str] | None = None, seconds: float = 280) -> Done:
    """`fleetx COMMAND ...`."""
    return run(_fleetx, words, cwd=cwd, env=env, seconds=seconds)


def python(words: Sequence[Any], *, cwd: Path, env: Mapping[str, str] | None = None, seconds: float = 280) -> Done:
    """`python script.py ARGUMENTS`."""
    return run(script, words, cwd=cwd, env=env, seconds=seconds)


def run(
    main: Main, words: Sequence[Any], *, cwd: Path, env: Mapping[str, str] | None = None, seconds: float = 280
) -> Done:
    """As subprocess.run."""
    command = ForkedCommand(main, [str(word) for word in words], cwd=cwd, env=os.environ if env is None else env)
    try:
        out, err = command.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        command.send_signal(signal.SIGKILL)
        raise
    assert command.returncode is not None
    return subprocess.CompletedProcess([getattr(main, "__name__", main), *words], command.returncode, out, err)


Done = subprocess.CompletedProcess[str]


def _fleetx(words: list[str]) -> None:
    cli.main(words)


def script(words: list[str]) -> None:
    forget_multiprocessing()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    sys.argv = words
    runner.run("script", words[0])


MODULES: dict[str, Main] = {"fleetx.launch": fleetx.launch.main, "fleetx.cli": _fleetx}


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

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return self.poll()

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
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return texts[0], texts[1]


def _run(main: Main, words: list[str], cwd: str, env: dict[str, str], out: Connection, err: Connection) -> None:
    """As Python runs a command."""
    os.chdir(cwd)
    sys.path[:] = [path for path in sys.path if not path.startswith(TESTS)]
    with open(os.devnull) as nothing:
        as_python(main, words, env, (nothing, out, err), before=fork_workers_of_fleetrun)


def as_python(
    main: Main, words: list[str], env: Mapping[str, str], files: Sequence[Any], before: Callable[[], None]
) -> None:
    """main(words) with these standard files, as the first and last that a process does."""
    for fd, file in enumerate(files):
        os.dup2(file.fileno(), fd)
    for file in files:
        file.close()
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(fd, mode, closefd=False) for fd, mode in enumerate("rww"))
    os.environ.clear()
    os.environ.update(env)
    show_environment()
    before()
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


def show_environment() -> None:
    """Write os.environ where /proc shows that of a process: what finds processes by a mark must find forks, too."""
    if not os.path.exists("/proc/self/stat"):
        return
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, last = int(fields[47]), int(fields[48])  # env_start and env_end
    shown = b"".join(name + b"=" + value + b"\0" for name, value in os.environb.items())
    assert len(shown) <= last - first, "give the fork server a larger environment"
    ctypes.memmove(first, shown.ljust(last - first, b"\0"), last - first)


def fork_workers_of_fleetrun() -> None:
    """Also those of the first attempt: they need not wait for the server, which has imported everything already."""
    server = _Server()

    class Launch(start.Launch):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.helpers.add(server.pid)

        def _prepare_restart(self) -> None:
            """Nothing: this server forks the workers of a restart, too."""

    start.Launch = Launch  # type: ignore[misc]
    workers.LocalWorkers._popen = staticmethod(server.fork)  # type: ignore[method-assign, assignment]


class _Server(warm.ForkServer):
    """A fork server that is a fork of this process."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            runner.die_with(parent)
            _serve(theirs)
        theirs.close()

    def fork(self, command, environ):
        fork_server.send(self._connection, {"environ": dict(environ), "command": list(command)})
        return warm.Forked(fork_server.receive(self._connection)["pid"])


def _serve(connection: socket.socket) -> None:
    connection = socket.socket(fileno=os.dup2(connection.detach(), 3, inheritable=False))
    os.closerange(4, 4096)
    gc.freeze()
    fork_server.serve_workers(connection, imported(), run=_work, compare_all=False)


def imported() -> dict[str, Any]:
    """What a new process would import again."""
    return {
        name: module
        for name, module in sys.modules.items()
        if name != "__main__" and name.partition(".")[0] not in sys.stdlib_module_names
    }


def _work(command: list[str]) -> None:
    """As `python -u runner.py COMMAND`."""
    show_environment()
    sys.stdout, sys.stderr = (io.TextIOWrapper(os.fdopen(fd, "wb", 0), write_through=True) for fd in (1, 2))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    forget_multiprocessing()
    code = 0
    try:
        runner.main(command)
    except SystemExit as error:
        code = runner.exit_code_of(error)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    runner.end(code)


def forget_multiprocessing() -> None:
    """A worker is not a process of multiprocessing, and has its own server and tracker if it starts such processes."""
    multiprocessing.process._children = set()  # type: ignore[attr-defined]
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    main = next(
        kind for kind in multiprocessing.process.BaseProcess.__subclasses__() if kind.__name__ == "_MainProcess"
    )
    multiprocessing.process._current_process = main()  # type: ignore[attr-defined]
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker.__init__()  # type: ignore[attr-defined]
    forkserver._forkserver.__init__()  # type: ignore[attr-defined]
