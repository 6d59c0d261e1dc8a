"""`python forked_worker.py -u -c COMMAND`, for xdist: the same as `python -u -c COMMAND`, in a fork of the server.

A worker of pytest would import for ten seconds what the server has imported. No torch here: this process only waits.
"""

from __future__ import annotations

import os
import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import ModuleType

from forking import forks


def work(command: str, stdin: Connection, stdout: Connection, environ: dict[str, str]) -> None:
    from forked_command import as_python, forget_multiprocessing

    sys.argv = ["-c"]
    sys.modules["__main__"] = main = ModuleType("__main__")
    as_python(lambda _: exec(command, vars(main)), [], environ, (stdin, stdout), before=forget_multiprocessing)


def start() -> int:
    files = Connection(os.dup(0)), Connection(os.dup(1))
    process = get_context(forks()).Process(target=work, args=(sys.argv[-1], *files, dict(os.environ)))
    process.start()
    for file in (0, 1):  # so that the worker has the only ones, and its end is seen
        os.dup2(os.open(os.devnull, os.O_RDWR), file)
    for connection in files:
        connection.close()
    process.join()
    return process.exitcode or 0


if __name__ == "__main__":
    sys.exit(start())
