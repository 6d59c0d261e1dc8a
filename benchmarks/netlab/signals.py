"""An end by a signal is an end with tidying up."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

DEADLY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def heard() -> Iterator[None]:
    """Signals that would end the process on the spot raise SystemExit instead. Other handlers stay as they are."""
    if not _may_handle():
        yield
        return
    unheard = [number for number in DEADLY if signal.getsignal(number) is signal.SIG_DFL]
    for number in unheard:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in unheard:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """A second Ctrl-C must not stop the tidying halfway: signals are kept, and the first is raised afterwards."""
    if not _may_handle():
        yield
        return
    kept: list[int] = []
    before = {number: signal.signal(number, lambda n, _: kept.append(n)) for number in DEADLY}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if kept:
        signal.raise_signal(kept[0])


def _leave(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _may_handle() -> bool:
    return threading.current_thread() is threading.main_thread()
