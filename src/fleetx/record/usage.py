"""Bytes that this process has sent over TCP, and the most that it has held."""

from __future__ import annotations

import resource

import psutil
import torch

from fleetx.comm import kernel


class Usage:
    def __init__(self, device: torch.device):
        self._device = device
        self._known = kernel.bytes_sent()
        self._sent = 0

    def sent(self) -> int | None:
        """Since this object was made. None on CUDA, whose ranks do not communicate over TCP."""
        if self._device.type == "cuda":
            return None
        now = kernel.bytes_sent()  # by connection: some are closed meanwhile
        self._sent += sum(total - self._known.get(name, 0) for name, total in now.items())
        self._known = now
        return self._sent

    def peak(self) -> int:
        """On a GPU, of its memory; else of the whole process, with Python and torch itself."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def held(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return int(psutil.Process().memory_info().rss)
