"""Several jobs at once, in threads that neither outlive an interruption nor delay it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

In = TypeVar("In")
Out = TypeVar("Out")

_GRACE = 2.0  # seconds for threads to notice; one that waits for a server is left, and writes nothing when it wakes


class Jobs(Generic[In, Out]):
    """`work` for each item, `width` at once; a result or the exception for each item, in order.

    Not concurrent.futures: its threads are joined at exit, so Ctrl-C would wait for a stalled server.
    """

    def __init__(self, work: Callable[[In], Out], items: Sequence[In], *, width: int, stop: threading.Event):
        self._work, self._items, self._stop = work, items, stop
        self._left: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(len(items)):
            self._left.put(index)
        self._results: dict[int, Out | Exception] = {}
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(min(width, len(items)))]

    def results(self) -> list[Out | Exception]:
        try:
            for thread in self._threads:
                thread.start()
            for thread in self._threads:
                thread.join()
        except BaseException:
            self._stop.set()
            until = time.monotonic() + _GRACE
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join(max(0.0, until - time.monotonic()))
            raise
        return [self._results[index] for index in range(len(self._items))]

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                index = self._left.get_nowait()
            except queue.Empty:
                return
            try:
                self._results[index] = self._work(self._items[index])
            except Exception as error:  # handed to the caller, who knows what was asked for
                self._results[index] = error
