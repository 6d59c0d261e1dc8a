"""Calls that may never return, made in a thread so that the caller can give up on them.

A TCPStore waits in C++, where Ctrl-C cannot interrupt it. It waits forever if the other machine has lost power, or if
the port belongs to another service.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

Result = TypeVar("Result")


class NoAnswerError(Exception):
    """A call did not return in time; later calls will not be tried."""


class CallerThread:
    """A thread that makes calls in order. The caller waits with a timeout, and signals can interrupt the wait."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._stuck = False
        threading.Thread(target=self._run, name="fleetx-caller", daemon=True).start()

    def call(self, function: Callable[..., Result], *arguments: Any, seconds: float) -> Result:
        """Return `function(*arguments)`, or raise NoAnswerError after `seconds`."""
        if self._stuck:
            raise NoAnswerError
        future: Future[Result] = Future()
        self._calls.put((partial(function, *arguments), future))
        if not wait([future], timeout=seconds).done:
            self._stuck = True
            raise NoAnswerError
        return future.result()

    def _run(self) -> None:
        while True:
            call, future = self._calls.get()
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
