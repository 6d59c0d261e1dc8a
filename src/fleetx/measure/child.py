"""Run a call in a forked child, which may run out of memory, hang or die without harming this process.

A fork needs no pickling: models, closures and data are already there, and what the child changes stays in the child.

fork() copies only the calling thread. libgomp keeps a pool of worker threads for every thread that has run a parallel
region, so in the child the forking thread would wait forever for workers that were not copied. A new thread has no
pool yet and creates its own: the call runs in a new thread, with as many OpenMP threads as the parent. torch itself
restarts autograd's engine after a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

_PR_SET_PDEATHSIG = 1
_OUT_OF_MEMORY = "it ran out of memory"


@dataclass(frozen=True)
class Answer:
    """A value (plain data), or why there is none."""

    value: Any = None
    error: str = ""


def forked(call: Callable[[], Any], *, seconds: float) -> Answer:
    """Run the call in a forked child and return its answer."""
    reading, writing = os.pipe()
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn about forking with threads, see above
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
            os.kill(child, signal.SIGKILL)  # it has answered, or never will
        status = _status(child)
    if text is None:
        return Answer(error=f"it took more than {seconds:.0f} s")
    if not text:
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        return Answer(error="it was killed, probably for lack of memory" if killed else f"it died (status {status})")
    return Answer(**json.loads(text))


def _status(child: int) -> int:
    try:
        return os.waitpid(child, 0)[1]
    except ChildProcessError:  # the program ignores SIGCHLD, so the status is lost
        return signal.SIGKILL


def _read(pipe: int, deadline: float) -> str | None:
    """Everything until the other end is closed, or None after the deadline."""
    data = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            return None
        chunk = os.read(pipe, 1 << 16)
        if not chunk:
            return data.decode()
        data += chunk


def _in_child(call: Callable[[], Any], pipe: int, parent: int) -> None:
    """Never returns, because the parent's exit handlers must not run here."""
    try:
        _isolate(parent)
        gc.freeze()  # or the first collection would write to, and so copy, every page with an object of the parent
        # A new thread starts without the autocast of the one that forked. If autocast is off, do not enter a context:
        # an outer context would keep the casts of an inner one in torch's cache.
        on = torch.is_autocast_enabled("cpu")
        autocast = torch.autocast("cpu", torch.get_autocast_dtype("cpu")) if on else nullcontext()
        thread = threading.Thread(target=_answer, args=(call, pipe, autocast), daemon=True)
        thread.start()
        thread.join()
    finally:
        os._exit(0)


def _isolate(parent: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the kernel should kill this process
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # what a trial prints must not look like output of the training
        os.dup2(null, stream)


def _answer(call: Callable[[], Any], pipe: int, autocast: Any) -> None:
    try:
        with autocast:
            answer = Answer(value=call())
    except MemoryError:
        answer = Answer(error=_OUT_OF_MEMORY)
    except BaseException as error:
        text = " ".join(str(error).split())
        out_of_memory = "DefaultCPUAllocator" in text
        answer = Answer(error=_OUT_OF_MEMORY if out_of_memory else f"{type(error).__name__}: {text[:300]}")
    with os.fdopen(pipe, "w") as out:
        json.dump(asdict(answer), out)
