"""`python forked_python.py WORDS` is `python WORDS` in a fork of the server, for programs that start Python themselves.

Only waits for the fork, and passes on its exit code but no signals. Without torch, this takes a tenth of a second.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import ModuleType

from forking import forks, share_forks


def command() -> list[str]:
    """What to start instead of `python`."""
    share_forks()
    return [sys.executable, __file__]


def work(words: list[str], files: list[Connection], environ: Mapping[str, str]) -> None:
    from forked_command import as_python, forget_multiprocessing, script

    as_python(_code if "-c" in words else script, words, environ, files, before=forget_multiprocessing)


def _code(words: list[str]) -> None:
    at = words.index("-c")
    sys.argv = ["-c", *words[at + 2 :]]
    sys.modules["__main__"] = main = ModuleType("__main__")
    exec(words[at + 1], vars(main))


def start() -> int:
    files = [Connection(os.dup(number)) for number in range(3)]
    process = get_context(forks()).Process(target=work, args=(sys.argv[1:], files, dict(os.environ)))
    process.start()
    for file in files:
        file.close()
    for number in range(3):  # so that only the fork keeps them open, and others see when it ends
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    process.join()
    return process.exitcode or 0


if __name__ == "__main__":
    sys.exit(start())
