"""What a worker is doing at this moment: a few numbers in a file that all processes map."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

PHASES = ("start", "load", "step", "save", "commit")
_FORMAT = struct.Struct("=4q")  # pid, phase, phase of the save, steps done


class Mark(NamedTuple):
    pid: int
    phase: str
    step: int


class Marks:
    """One rank's file. A save in the background has a phase of its own, which counts while there is one."""

    def __init__(self, folder: Path, rank: int):
        handle = os.open(folder / f"marks-{rank}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(handle, _FORMAT.size)
            self._map = mmap.mmap(handle, _FORMAT.size)
        finally:
            os.close(handle)

    def begin(self) -> None:
        """A new process: it starts."""
        self._map[:] = _FORMAT.pack(os.getpid(), PHASES.index("start"), -1, 0)

    def set(self, phase: str) -> None:
        struct.pack_into("=q", self._map, 8, PHASES.index(phase))

    def done(self, step: int) -> None:
        struct.pack_into("=q", self._map, 24, step)

    def read(self) -> Mark:
        pid, phase, saving, step = _FORMAT.unpack(self._map[:])
        return Mark(pid, PHASES[saving if saving >= 0 else phase], step)

    def during(self, phase: str, act: Callable[..., Any]) -> Callable[..., Any]:
        """`act`, which is marked as this phase while it runs."""
        place = 16 if phase in ("save", "commit") else 8

        def marked(*words: Any, **named: Any) -> Any:
            before = struct.unpack_from("=q", self._map, place)
            struct.pack_into("=q", self._map, place, PHASES.index(phase))
            try:
                return act(*words, **named)
            finally:
                struct.pack_into("=q", self._map, place, *before)

        return marked


def now() -> float:
    """Seconds on a clock that all processes of this machine share."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)
