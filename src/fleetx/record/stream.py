"""Writes lines in its own thread. Rank 0 also collects lines of the other ranks.

They leave these lines in the store, where rank 0 picks them up: no rank waits for another during training, and there is
no collective.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fleetx.base.worker_thread import WorkerThread
from fleetx.record.schema import encode
from fleetx.record.usage import Usage

log = logging.getLogger(__name__)

Sink = Callable[[dict[str, Any]], None]  # a tracker, called with every line
_LAST = 5.0  # seconds that rank 0 waits for the last lines of the others
_GATHERED = ("event", "trace", "start")  # kinds of lines that rank 0 collects from the others, besides `rank`


class Stream:
    def __init__(self, folder: Path, rank: int, size: int, store: Any, usage: Usage, *, every_rank: bool,
                 sinks: list[Sink]):  # fmt: skip
        """store: where the other ranks leave their lines for rank 0; None with a single rank."""
        self.folder, self.rank, self._size, self._store, self.usage = folder, rank, size, store, usage
        self._sinks = sinks
        self._file = _opened(folder / f"rank{rank}.jsonl") if rank == 0 or every_rank else None
        self._sent = 0  # messages that this rank has left in the store
        self._heard = [0] * size  # messages of each rank that rank 0 has read
        self._host = socket.gethostname()
        self._broken = False
        self._thread = WorkerThread("record", torch.device("cpu"))

    def put(self, lines: list[dict[str, Any]], totals: dict[str, Any]) -> None:
        self._thread.submit(partial(self._try, partial(self._handle, lines, totals)))

    def close(self, *, everyone: bool) -> None:
        """Write what is left. everyone: wait for the last lines of the other ranks, which are ending normally too."""
        self._thread.submit(partial(self._end, everyone))
        self._thread.stop(2 * _LAST)

    # --- in the thread ----------------------------------------------------------------------------
    def _end(self, everyone: bool) -> None:
        self._try(partial(self._finish, everyone))
        if self._file is not None:
            self._file.close()
        for sink in self._sinks:
            self._try(getattr(sink, "close", lambda: None))

    def _try(self, work: Callable[[], None]) -> None:
        """A full disk or a lost rank must not end a training."""
        try:
            work()
        except Exception as error:
            if not self._broken:
                log.warning("the record in %s is incomplete: %s", self.folder, error)
            self._broken = True

    def _handle(self, lines: list[dict[str, Any]], totals: dict[str, Any]) -> None:
        used = {"sent": self.usage.sent(), "peak": self.usage.peak(), "host": self._host}
        mine = {"kind": "rank", "t": round(time.time(), 4), "rank": self.rank, **totals}
        lines.append(mine | {key: value for key, value in used.items() if value is not None})
        self._write(lines)
        if self._store is None:
            return
        if self.rank:
            told = [line for line in lines if line["kind"] == "rank" or line["kind"] in _GATHERED]
            self._store.set(f"{self.rank}/{self._sent}", json.dumps([encode(_rounded(line)) for line in told]))
            self._sent += 1
        else:
            self._write(list(self._collected()))

    def _collected(self) -> Iterator[dict[str, Any]]:
        for rank in range(1, self._size):
            while self._store.check([key := f"{rank}/{self._heard[rank]}"]):
                self._heard[rank] += 1
                yield from map(json.loads, json.loads(self._store.get(key)))
                self._store.delete_key(key)

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self._file is not None and lines:
            self._file.write("".join(f"{encode(_rounded(line))}\n" for line in lines))
            self._file.flush()
        for sink in self._sinks:
            for line in lines:
                sink(line)

    def _finish(self, everyone: bool) -> None:
        if self._store is None:
            return
        if self.rank:
            self._store.set(f"{self.rank}/done", str(self._sent))
            return
        others, end = [f"{rank}/done" for rank in range(1, self._size)], time.monotonic() + _LAST
        while everyone and not self._store.check(others) and time.monotonic() < end:
            time.sleep(0.01)
        self._write(list(self._collected()))


def _opened(path: Path) -> Any:
    """Open a file to append to it, on a new line: a process that was killed may have left half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115  closed by the thread
    if file.tell():
        with open(path, "rb") as before:
            before.seek(-1, 2)
            if before.read(1) != b"\n":
                file.write("\n")
    return file


def _rounded(line: dict[str, Any]) -> dict[str, Any]:
    """Round seconds to the microsecond."""
    if "time" not in line:
        return line
    found = line | {"seconds": round(line["seconds"], 6)}
    for key in ("time", "first"):
        if key in line:
            found[key] = {kind: round(seconds, 6) for kind, seconds in line[key].items()}
    return found
