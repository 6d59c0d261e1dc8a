"""Calls that may never return, made so that nobody has to wait for them.

A TCPStore waits in C++, where no Ctrl-C reaches it, and for ever if the other machine has lost its power or if the port
belongs to some other service.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Answer = TypeVar("Answer")


class SilenceError(Exception):
    """No answer in time; there will be none to later calls either."""


class Voice:
    """One thread that makes the calls, in order; who asks waits where signals are heard, and only as long as said."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...], queue.SimpleQueue[Any]]]
        self._calls = queue.SimpleQueue()
        self._silent = False
        threading.Thread(target=self._run, name="voice", daemon=True).start()

    def ask(self, call: Callable[..., Answer], *arguments: Any, seconds: float) -> Answer:
        if self._silent:
            raise SilenceError
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls.put((call, arguments, answer))
        try:
            value, error = answer.get(timeout=seconds)
        except queue.Empty:
            self._silent = True
            raise SilenceError from None
        if error is not None:
            raise error
        return value

    def _run(self) -> None:
        while True:
            call, arguments, answer = self._calls.get()
            try:
                answer.put((call(*arguments), None))
            except Exception as error:
                answer.put((None, error))
