"""Bytes that this process has sent over TCP, and the most memory that it has held."""

from __future__ import annotations

import resource
import threading
import time

import psutil
import torch

from fleetx.comm import kernel

_SHARE = 333  # bytes are counted again after this many times what a count takes: 20 microseconds with a few ranks


class Usage:
    def __init__(self, device: torch.device):
        self._device = device
        self._files = kernel.tcp_files()
        self._known = kernel.bytes_sent(self._files)
        self._sent = 0
        self._lock = threading.Lock()  # both the training and the writing thread ask

    def sent(self, *, quickly: bool = False) -> int | None:
        """Bytes since this object was created. None on CUDA, whose ranks do not communicate over TCP.

        quickly: count only connections that were open at the last call without `quickly`.
        """
        if self._device.type == "cuda":
            return None
        with self._lock:
            if not quickly:
                self._files = kernel.tcp_files()
            now = kernel.bytes_sent(self._files)  # by connection, because some may have closed
            self._sent += sum(total - self._known.get(name, 0) for name, total in now.items())
            self._known = now
            return self._sent

    def peak(self) -> int:
        """Peak bytes of GPU memory; without a GPU, of the whole process, including Python and torch itself."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def held(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return int(psutil.Process().memory_info().rss)


class RoundBytes:
    """Counts bytes in every round. If that takes too long, only now and then, in two rounds in a row.

    It takes two, because the bytes that a round sent are the difference between two counts.
    """

    def __init__(self, usage: Usage):
        self._usage = usage
        self._before: int | None = None  # sent up to the end of the last round, if counted then
        self._counts_next = False  # whether to count in the next round in any case
        self.due = 0.0  # when it may count again

    def of_round(self) -> dict[str, int]:
        """At the end of a round: the bytes `sent` in it and the `peak` so far, if counted."""
        now, begun, before = time.monotonic(), time.thread_time(), self._before
        if now < self.due and not self._counts_next:
            self._before = None
            return {}
        sent, found = self._usage.sent(quickly=True), {"peak": self._usage.peak()}
        if sent is not None and before is not None:
            found["sent"] = sent - before
        self._before, self._counts_next = sent, sent is not None and before is None
        self.due = max(self.due, now) + _SHARE * (time.thread_time() - begun)
        return found
