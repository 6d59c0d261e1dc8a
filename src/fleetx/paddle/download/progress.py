"""How far it is: a bar for a person at a terminal, a line now and then for a log."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

EVERY = 10.0  # seconds between two lines


def say(text: str) -> None:
    print(f"fleetx: {text}", file=sys.stderr, flush=True)


def amount(size: int) -> str:
    """12 B, 3.4 MB ..."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


class Progress:
    """`reached` and `done` are called by the downloading threads. `size` is None if a server did not tell lengths."""

    def __init__(self, *, files: int, size: int | None, bar: bool):
        self._files, self._size = files, size
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = {}
        self._have = self._finished = 0
        self._spoken = time.monotonic()
        self._bar: Any = _rich_bar() if bar and sys.stderr.isatty() else None
        self._task = self._bar.add_task(f"0 of {files} files", total=size) if self._bar else None

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def reached(self, name: str, size: int) -> None:
        """So many bytes of the file are here; fewer than before, if it had to start again."""
        with self._lock:
            self._have += size - self._bytes.get(name, 0)
            self._bytes[name] = size
            self._show()

    def done(self) -> None:
        """One file is checked and, if it is a tar, unpacked."""
        with self._lock:
            self._finished += 1
            self._show()

    def _show(self) -> None:
        if self._bar:
            self._bar.update(self._task, completed=self._have, description=f"{self._finished} of {self._files} files")
        elif time.monotonic() - self._spoken >= EVERY:
            self._spoken = time.monotonic()
            whole = f" of {amount(self._size)}" if self._size is not None else ""
            say(f"{self._finished} of {self._files} files are here, {amount(self._have)}{whole}")


def _rich_bar() -> Any:
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
    )
