"""Show progress: a bar on a terminal, a line from time to time in a log."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

from fleetx.base import sizes

EVERY = 10.0  # seconds between two lines


def say(text: str) -> None:
    print(f"fleetx: {text}", file=sys.stderr, flush=True)


class Progress:
    """Thread-safe. `size` is the number of bytes to download, or None if the server does not say."""

    def __init__(self, *, files: int, size: int | None, bar: bool):
        self._files, self._size, self._finished, self._received = files, size, 0, 0
        self._bytes: dict[str, int] = {}
        self._lock, self._printed = threading.Lock(), time.monotonic()
        self._bar: Any = _rich_bar() if bar and sys.stderr.isatty() else None

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
            self._bar.add_task("", total=self._size)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def on_bytes(self, name: str, size: int) -> None:
        """`size` bytes of the file have arrived: fewer than before if its download was restarted."""
        with self._lock:
            self._received += size - self._bytes.get(name, 0)
            self._bytes[name] = size
            self._show()

    def on_file(self) -> None:
        """Count one more file as checked and, if it is a tar, unpacked."""
        with self._lock:
            self._finished += 1
            self._show()

    def _show(self) -> None:
        files = f"{self._finished} of {self._files} files"
        if self._bar:
            self._bar.update(0, completed=self._received, description=files)
        elif time.monotonic() - self._printed >= EVERY:
            self._printed = time.monotonic()
            total = f" of {sizes.format_bytes(self._size)}" if self._size is not None else ""
            say(f"{files} downloaded, {sizes.format_bytes(self._received)}{total}")


def _rich_bar() -> Any:
    from rich import progress as p
    from rich.console import Console

    columns = (p.BarColumn(), p.DownloadColumn(), p.TransferSpeedColumn(), p.TimeRemainingColumn())
    return p.Progress(p.TextColumn("{task.description}"), *columns, console=Console(stderr=True))
