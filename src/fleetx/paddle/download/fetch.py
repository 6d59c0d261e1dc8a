"""Download one file: resume it, retry it, check its md5."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from fleetx.base import sizes
from fleetx.errors import DownloadError, UsageError
from fleetx.paddle.download.remote import Remote, TransientError

_CHUNK = 1 << 20
_RESERVE = 64 << 20  # bytes of disk to leave free when the length of a file is unknown: it may never end
_PROGRESS = 1 << 20  # an attempt that gets this many bytes further than all before does not count as failed


class AbortedError(Exception):
    """The main thread was interrupted, so the others stop early. Never leaves this package."""


@dataclass(frozen=True)
class Patience:
    """When to give up on a server.

    `attempts`: failed attempts in a row. `pause`: seconds before the second attempt, doubled before each further one.
    `timeout`: seconds without a byte after which the connection counts as lost.
    """

    attempts: int = 5
    pause: float = 0.5
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.pause < 0 or self.timeout <= 0:
            raise UsageError(f"{self}: attempts must be at least 1, pause at least 0 and timeout above 0")


@dataclass(frozen=True)
class Fetcher:
    """Downloads files of one remote folder until `stop` is set. Tells `on_bytes` how much of a file has arrived."""

    remote: Remote
    patience: Patience
    stop: threading.Event
    on_bytes: Callable[[str, int], None] = lambda name, size: None

    def fetch(self, name: str, part: Path, target: Path, *, md5: str | None = None) -> None:
        """Download to `part`, then rename to `target`.

        A part is resumed only if there is an md5: without one, two versions of a file could be mixed silently.
        """
        actual = None
        for _ in range(2):
            self._download(name, part, resume=md5 is not None)
            actual = md5 and md5_of(part, self.stop)
            if actual == md5:
                target.parent.mkdir(parents=True, exist_ok=True)
                part.replace(target)
                return
            part.unlink()
        raise DownloadError(
            f"{self.remote.display(name)}: was downloaded twice and has the md5 {actual}, but filelist.txt has {md5}: "
            "correct filelist.txt, or replace the file"
        )

    def _download(self, name: str, part: Path, *, resume: bool) -> None:
        part.parent.mkdir(parents=True, exist_ok=True)
        failures, furthest = 0, _size(part)
        while True:
            try:
                return self._stream(name, part, start=_size(part) if resume else 0)
            except TransientError as error:
                failures = 0 if _size(part) - furthest >= _PROGRESS else failures + 1
                furthest = max(furthest, _size(part))
                if failures >= self.patience.attempts:
                    message = f"gave up after {failures} attempts: {error}"
                    raise DownloadError(f"{self.remote.display(name)}: {message}") from None
            pause = self.patience.pause * 2 ** max(failures - 1, 0)
            if self.stop.wait(pause * random.uniform(0.5, 1.0)):  # random, so that files are not all retried at once
                raise AbortedError

    def _stream(self, name: str, part: Path, *, start: int) -> None:
        reply = self.remote.open(name, start)
        size = reply.start
        with closing(reply.stream), part.open("ab" if size else "wb") as file:
            if reply.total is not None:
                check_disk(part.parent, reply.total - size, f"{name} still needs")
            while chunk := reply.read(_CHUNK):
                if self.stop.is_set():
                    raise AbortedError
                if reply.total is None:
                    check_disk(
                        part.parent, len(chunk) + _RESERVE, f"{name} has no stated length, and after {size} bytes needs"
                    )
                file.write(chunk)
                size += len(chunk)
                self.on_bytes(name, size)
            file.flush()
            os.fsync(file.fileno())  # before the rename: a power cut must not leave an empty file under the final name
        if reply.total is not None and size < reply.total:
            raise TransientError(f"the connection ended after {size} of {reply.total} bytes")


def md5_of(path: Path, stop: threading.Event) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            if stop.is_set():
                raise AbortedError
            digest.update(chunk)
    return digest.hexdigest()


def check_disk(folder: Path, needed: int, subject: str, *, hint: str = "") -> None:
    """Raise an error if the disk has less than `needed` bytes left. `subject` begins the message: "a.tar needs"."""
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise DownloadError(
            f"{subject} {sizes.format_bytes(needed)}, but {folder} has {sizes.format_bytes(free)} of disk space "
            f"left{hint}"
        )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
