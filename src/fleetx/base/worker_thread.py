"""A thread that runs work, such as collectives, one at a time, in the order in which it was submitted.

A reduction that takes several collectives cannot be chained with future callbacks on gloo: callbacks run in the order
in which the futures complete, which differs between ranks, so one rank would reduce the first bucket while another
reduces the second. The queue keeps the order in which backward filled the buckets, which is the same on every rank.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.futures import Future

Work = Callable[[], Any]
_JOIN_SECONDS = 5.0  # work that takes longer is waiting for a rank that is gone


class WorkerThread:
    """`submit(work)` returns a future of the work's result or exception.

    If the work itself returns a future, for example by submitting to another thread, the first one completes with it.
    """

    def __init__(self, name: str, device: torch.device):
        self._name, self._device = name, device
        self._queue: queue.SimpleQueue[tuple[Work, Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Work) -> Future[Any]:
        if self._device.type == "cuda":
            return self._on_stream(work)
        future: Future[Any] = Future()
        self._queue.put((work, future))
        if self._thread is None:  # started with the first work
            self._thread = threading.Thread(target=self._run, name=f"fleetx-{self._name}", daemon=True)
            self._thread.start()
        return future

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            _complete(*item)
            del item  # or its tensors would stay alive until the next item arrives

    def drain(self) -> None:
        """Wait until all submitted work has run, and so has submitted its follow-up work to other threads."""
        if self._thread is not None and self._thread.is_alive():
            ran = threading.Event()
            self._queue.put((ran.set, Future()))
            ran.wait(_JOIN_SECONDS)

    def stop(self, timeout: float = _JOIN_SECONDS) -> None:
        """Finish all submitted work, then end the thread.

        A thread that is still inside a collective when its process group is destroyed would abort the process.
        """
        if self._thread is not None and self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(timeout)

    def _on_stream(self, work: Work) -> Future[Any]:
        """On an accelerator the stream keeps the order: collectives are queued, and waiting only blocks the stream."""
        future: Future[Any] = Future(devices=[self._device])
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))

        def waited() -> Any:
            result = work()
            return result.wait() if isinstance(result, Future) else result

        with torch.cuda.stream(stream):
            _complete(waited, future)
        return future


def _complete(work: Work, future: Future[Any]) -> None:
    try:
        with torch.no_grad():
            result = work()
    except Exception as error:
        future.set_exception(error)
        return
    if isinstance(result, Future):
        result.add_done_callback(lambda done: _complete(done.value, future))
    else:
        future.set_result(result)
