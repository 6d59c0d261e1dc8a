"""A thread that talks to the other ranks, one thing after the other, in the order in which it was asked.

What takes several collectives, each waiting for the one before, cannot be chained by callbacks of futures on gloo:
these run in the order in which the futures end, which differs between ranks, and then one rank reduces the first bucket
where another reduces the second. A line keeps the order in which backward filled the buckets, the same on all ranks.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.futures import Future

Work = Callable[[], Any]
_PATIENCE = 5.0  # seconds; whoever is not done then waits for a rank that is gone


class WorkerThread:
    """`ask(work)` returns at once; the future holds what the work returned, or raises what it raised.

    Work may hand over to another line, and return the future that it got there: then that one's end is the end.
    """

    def __init__(self, name: str, device: torch.device):
        self._name, self._device = name, device
        self._asked: queue.SimpleQueue[tuple[Work, Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def ask(self, work: Work) -> Future[Any]:
        if self._device.type == "cuda":
            return self._on_stream(work)
        future: Future[Any] = Future()
        self._asked.put((work, future))
        if self._thread is None:  # not before there is something to do
            self._thread = threading.Thread(target=self._talk, name=f"fleetx-{self._name}", daemon=True)
            self._thread.start()
        return future

    def _talk(self) -> None:
        while (asked := self._asked.get()) is not None:
            _do(*asked)
            del asked  # what it holds must not live until the next one comes

    def stop(self) -> None:
        """Do what was asked so far, and no more. A thread inside of a collective when its group goes would abort."""
        if self._thread is not None and self._thread.is_alive():
            self._asked.put(None)
            self._thread.join(timeout=_PATIENCE)

    def _on_stream(self, work: Work) -> Future[Any]:
        """An accelerator keeps the order by itself: its collectives are queued, and a wait makes the stream wait."""
        future: Future[Any] = Future(devices=[self._device])
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            _do(lambda: _waited(work()), future)
        return future


def _waited(result: Any) -> Any:
    """On an accelerator that makes the stream wait, and not us."""
    return result.wait() if isinstance(result, Future) else result


def _do(work: Work, future: Future[Any]) -> None:
    try:
        with torch.no_grad():
            result = work()
    except Exception as error:
        future.set_exception(error)
    else:
        _end(future, result)


def _end(future: Future[Any], result: Any) -> None:
    if not isinstance(result, Future):
        future.set_result(result)
    else:
        result.add_done_callback(lambda ended: _do(ended.value, future))
