"""Run something in a child that has all that this process has, and that may run out of memory, hang or die.

A forked child needs no pickling: models, closures and data are there, and what it changes stays its own. OpenMP's
threads do not survive a fork, but they belong to the thread that started them: a new thread gets new ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_PR_SET_PDEATHSIG = 1
KILLED = "it was killed, as when memory runs out"


@dataclass(frozen=True)
class Answer:
    """What came of it: a value (plain data), or a sentence about what went wrong."""

    value: Any = None
    error: str = ""


def forked(call: Callable[[], Any], *, seconds: float) -> Answer:
    reading, writing = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads, see above
        child = os.fork()
    if child == 0:
        os.close(reading)
        _in_child(call, writing, parent)
    os.close(writing)
    try:
        text = _read(reading, time.monotonic() + seconds)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)  # it has answered, or will not
        status = _status(child)
    if text is None:
        return Answer(error=f"it took more than {seconds:.0f} s")
    if not text:
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        return Answer(error=KILLED if killed else f"it died (status {status})")
    return Answer(**json.loads(text))


def _status(child: int) -> int:
    try:
        return os.waitpid(child, 0)[1]
    except ChildProcessError:  # somebody ignores SIGCHLD, and nobody knows any more
        return signal.SIGKILL


def _read(pipe: int, until: float) -> str | None:
    """All that comes until the other end is closed; None: it was not in time."""
    found = b""
    while True:
        left = until - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            return None
        piece = os.read(pipe, 1 << 16)
        if not piece:
            return found.decode()
        found += piece


def _in_child(call: Callable[[], Any], pipe: int, parent: int) -> None:
    """Never returns: whatever the parent had planned for its end must not happen here."""
    try:
        _die_with(parent)
        thread = threading.Thread(target=_answer, args=(call, pipe), daemon=True)
        thread.start()
        thread.join()
    finally:
        os._exit(0)


def _die_with(parent: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, this process is the one to go
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # what a trial prints would be taken for the training's own
        os.dup2(nothing, stream)


def _answer(call: Callable[[], Any], pipe: int) -> None:
    try:
        answer = Answer(value=call())
    except MemoryError:
        answer = Answer(error="it ran out of memory")
    except BaseException as error:
        text = " ".join(str(error).split())
        short = "it ran out of memory" if "DefaultCPUAllocator" in text else f"{type(error).__name__}: {text[:300]}"
        answer = Answer(error=short)
    with os.fdopen(pipe, "w") as out:
        json.dump({"value": answer.value, "error": answer.error}, out)
