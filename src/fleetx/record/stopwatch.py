"""Seconds between two marks. On CUDA they are measured on the device, and known when it gets there: nobody waits."""

from __future__ import annotations

import time
from typing import Any

import torch

Mark = Any  # seconds on the host, or an event on the device


class Stopwatch:
    def __init__(self, device: torch.device):
        self._device = device if device.type == "cuda" else None

    def mark(self) -> Mark:
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @staticmethod
    def reached(mark: Mark) -> bool:
        return isinstance(mark, float) or bool(mark.query())

    @staticmethod
    def seconds(start: Mark, end: Mark) -> float:
        if isinstance(start, float):
            return float(end - start)
        return float(start.elapsed_time(end)) / 1000
