"""SIGTERM, by which a scheduler takes a machine away."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

STOPPED = 128 + signal.SIGTERM  # the exit code of a process that SIGTERM ended
_AGAIN = 10.0  # seconds after which another SIGTERM is meant as one


class Term:
    """Notices SIGTERM. Another one, later, ends the process at once; at the same time, a launcher may have passed on
    what the scheduler sent to every process."""

    def __init__(self) -> None:
        self.asked = False
        self._when = 0.0
        self._before: Any = None
        self._active = threading.current_thread() is threading.main_thread()
        if self._active:
            self._before = signal.signal(signal.SIGTERM, self._notice)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.asked:
            self.asked, self._when = True, now
        elif now - self._when > _AGAIN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def restore(self) -> None:
        if self._active:
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
            self._active = False
