"""SIGTERM, with which a scheduler reclaims a machine.

Many schedulers send it to every process of a job. A rank notes it and saves after a step. To finish that step it needs
the workers of its loader, so workers that a DataLoader forks while `Term` is active obey only their parent.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from traceback import walk_stack
from types import FrameType
from typing import Any

STOPPED = 128 + signal.SIGTERM  # the exit code of a process that SIGTERM ended
_AGAIN = 10.0  # seconds after which another SIGTERM ends the process at once
_LOOK = 1.0  # seconds between a forked child's checks of its parent
_SIGNALS = {signal.SIGTERM}
_noticing: list[Term] = []


class Term:
    """Notices SIGTERM. A second one ends the process at once, unless it comes soon after the first: then a launcher may
    have passed on what the scheduler sent to every process."""

    def __init__(self) -> None:
        self.asked = False
        self.before: Any = None
        self._when = 0.0
        self._active = threading.current_thread() is threading.main_thread()
        if self._active:
            self.before = signal.signal(signal.SIGTERM, self._notice) or signal.SIG_DFL
            _noticing.append(self)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.asked:
            self.asked, self._when = True, now
        elif now - self._when > _AGAIN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def restore(self) -> None:
        if self._active:
            signal.signal(signal.SIGTERM, self.before)
            self._active = False
            _noticing.remove(self)


def _in_child() -> None:
    """A forked child does not note SIGTERM, because it has no training to save."""
    if not _noticing:
        return
    before = _noticing[0].before
    for term in _noticing:
        term._active = False
    _noticing.clear()
    signal.signal(signal.SIGTERM, before)
    callers = (frame.f_globals.get("__name__") for frame, _ in walk_stack(sys._getframe()))
    if hasattr(signal, "sigtimedwait") and "torch.utils.data.dataloader" in callers:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # the worker will set its own handler, which would end it
        threading.Thread(target=_obey, args=(os.getppid(),), name="fleetx-sigterm", daemon=True).start()


def _obey(parent: int) -> None:
    """Wait for a SIGTERM from the parent, or for its end, and then end as torch's workers do."""
    found = None
    while os.getppid() == parent and (found is None or found.si_pid != parent):
        found = signal.sigtimedwait(_SIGNALS, _LOOK)
    os._exit(0)


os.register_at_fork(after_in_child=_in_child)
