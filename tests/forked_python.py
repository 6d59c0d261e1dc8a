"""`python forked_python.py WORDS` is `python WORDS` in a fork of the server, for programs that start Python themselves.

WORDS are a script, `-c` and code, or one of our commands: `-m fleetx.launch` (fleetrun) or `-m fleetx.cli` (fleetx).

This process only waits: it passes on the exit code, and if it is killed, the fork ends. Without torch, it takes a tenth
of a second.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from types import ModuleType

from forking import forks, share_forks


def command() -> list[str]:
    """What to start instead of `python`."""
    share_forks()
    return [sys.executable, __file__]


def work(words: list[str], alive: Connection, files: Sequence[Connection], environ: Mapping[str, str]) -> None:
    from forked_command import MODULES, TESTS, as_python, forget_multiprocessing, fork_workers_of_fleetrun, script

    def end_together() -> None:
        alive.poll(None)
        os._exit(1)

    threading.Thread(target=end_together, daemon=True).start()
    if "-c" in words[:-1] and words[0].startswith("-"):
        as_python(_code, words, environ, files, before=forget_multiprocessing)
    sys.path[:] = [path for path in sys.path if not path.startswith(TESTS)]
    if words[0] == "-m":
        as_python(MODULES[words[1]], words[2:], environ, files, before=fork_workers_of_fleetrun)
    as_python(script, words, environ, files, before=forget_multiprocessing)


def _code(words: list[str]) -> None:
    at = words.index("-c")
    sys.argv = ["-c", *words[at + 2 :]]
    sys.modules["__main__"] = main = ModuleType("__main__")
    exec(words[at + 1], vars(main))


def start() -> int:
    files = [Connection(os.dup(number)) for number in range(3)]
    for number in range(3):  # so that the fork alone keeps them open, and not even multiprocessing's own helper
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    theirs, _ours = Pipe(duplex=False)
    process = get_context(forks()).Process(target=work, args=(sys.argv[1:], theirs, files, dict(os.environ)))
    process.start()
    for file in (*files, theirs):
        file.close()
    process.join()
    return process.exitcode or 0


if __name__ == "__main__":
    sys.exit(start())
