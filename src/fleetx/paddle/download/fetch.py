"""One file: continued where an interruption left it, tried again when the connection drops, its md5 checked."""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fleetx.errors import DownloadError, UsageError
from fleetx.paddle.download.failure import Dropped, Stopped, refuse_if_full
from fleetx.paddle.download.listing import Listed
from fleetx.paddle.download.remote import Remote

_CHUNK = 1 << 20
_MOVES = 1 << 20  # a try that brings this much more than ever before does not count as a failed one


@dataclass(frozen=True)
class Patience:
    """How long to bear with a server: `attempts` in a row that bring nothing new, seconds before the second (then
    doubled), seconds without a byte that count as a dropped connection."""

    attempts: int = 5
    pause: float = 0.5
    timeout: float = 60.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.pause < 0 or self.timeout <= 0:
            raise UsageError(f"{self}: needs attempts of at least 1, pause of at least 0, timeout above 0")


@dataclass(frozen=True)
class Way:
    """From one remote folder, with patience, until told to stop; `reached` hears how many bytes of a file are here."""

    remote: Remote
    patience: Patience
    stop: threading.Event
    reached: Callable[[str, int], None] = lambda name, size: None


def fetch_checked(way: Way, file: Listed, part: Path, target: Path) -> None:
    """The file at `target`, with the right md5 or not at all; what is in `part` already is not asked for again."""
    found = ""
    for _ in range(2):
        _bring(way, file.name, part, resume=True)
        found = md5(part, stop=way.stop)
        if found == file.md5:
            return _settle(part, target)
        part.unlink()
    raise DownloadError(
        f"{way.remote.shown(file.name)}: was fetched twice and has the md5 {found}, but filelist.txt says {file.md5}"
    )


def fetch_unchecked(way: Way, name: str, part: Path, target: Path) -> None:
    """For files without a sum, which could not tell two versions apart: always from the first byte."""
    _bring(way, name, part, resume=False)
    _settle(part, target)


def md5(path: Path, *, stop: threading.Event) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            if stop.is_set():
                raise Stopped
            digest.update(chunk)
    return digest.hexdigest()


def _bring(way: Way, name: str, part: Path, *, resume: bool) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)
    failures, most = 0, _size(part)
    while True:
        try:
            return _stream(way, name, part, start=_size(part) if resume else 0)
        except Dropped as error:
            failures = 0 if _size(part) - most >= _MOVES else failures + 1
            most = max(most, _size(part))
            if failures >= way.patience.attempts:
                raise DownloadError(f"{way.remote.shown(name)}: gave up after {failures} tries: {error}") from None
        pause = way.patience.pause * 2 ** max(failures - 1, 0)
        if way.stop.wait(pause * random.uniform(0.5, 1.0)):  # not all files at the same moment
            raise Stopped


def _stream(way: Way, name: str, part: Path, *, start: int) -> None:
    with way.remote.open(name, start=start) as reply:
        if reply.total is not None:
            refuse_if_full(part.parent, reply.total - reply.start, f"{name} still needs")
        have = reply.start
        with part.open("ab" if have else "wb") as file:
            while chunk := reply.read(_CHUNK):
                if way.stop.is_set():
                    raise Stopped
                file.write(chunk)
                have += len(chunk)
                way.reached(name, have)
            file.flush()
            os.fsync(file.fileno())  # a name must never stand for bytes that a power cut could still take
    if reply.total is not None and have < reply.total:
        raise Dropped(f"the connection ended after {have} of {reply.total} bytes")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _settle(part: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part.replace(target)
