"""Run jobs in threads that neither delay Ctrl-C nor keep the process alive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

In = TypeVar("In")
Out = TypeVar("Out")

_GRACE = 2.0  # seconds to wait for threads after Ctrl-C; a thread that is blocked on a server is left behind


def run_jobs(
    work: Callable[[In], Out], items: Sequence[In], *, threads: int, stop: threading.Event
) -> list[Out | Exception]:
    """Call `work` for each item. Return the results in order; the result of an item that failed is its exception.

    Not concurrent.futures: it joins its threads at exit, so Ctrl-C would wait for a stalled server.
    """
    results: dict[int, Out | Exception] = {}
    indices = iter(range(len(items)))

    def run() -> None:
        for index in indices:
            if stop.is_set():
                return
            try:
                results[index] = work(items[index])
            except Exception as error:  # the caller decides what to do with it
                results[index] = error

    workers = [threading.Thread(target=run, daemon=True) for _ in range(min(threads, len(items)))]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    except BaseException:
        stop.set()
        deadline = time.monotonic() + _GRACE
        for worker in filter(threading.Thread.is_alive, workers):
            worker.join(max(0.0, deadline - time.monotonic()))
        raise
    return [results[index] for index in range(len(items))]
