"""Save in the background: copy at the time of the step, and write in a thread with its own process group."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fleetx.comm.world import World
from fleetx.engine.checkpoint.snapshot import Piece, Snapshot
from fleetx.engine.checkpoint.write import write

log = logging.getLogger(__name__)
NICE = 10  # niceness of the saving thread and those that it starts: a tenth of the training's CPU weight


class Saver:
    """Saves in this thread, or (`asynchronous`) in another one. Every rank must make one and use it in the same way."""

    def __init__(self, world: World, *, asynchronous: bool):
        self._world = world
        self._asynchronous = asynchronous
        if asynchronous:  # its collectives must not mix with those of the training
            self._world = replace(world, members=world.group() if world.size > 1 else None, device=torch.device("cpu"))
        self._staging: dict[str, Tensor] = {}  # reused, because new memory is slow to touch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fleetx-checkpoint")
        self._room: Future[None] | None = None
        self._saving: Future[None] | None = None

    @property
    def busy(self) -> bool:
        return self._saving is not None and not self._saving.done()

    def make_room(self, pieces: Mapping[str, Piece]) -> None:
        """Allocate memory for the copies before the first save: touching it takes longer than copying."""
        if self._asynchronous:
            self._room = self._thread.submit(self._touch, dict(pieces))

    def _touch(self, pieces: dict[str, Piece]) -> None:
        for name, piece in pieces.items():
            self._staging[name] = torch.empty(piece.tensor.shape, dtype=piece.tensor.dtype).zero_()

    def save(self, snapshot: Snapshot, folder: Path, done: Callable[[str], None]) -> None:
        """done: called afterwards, with what is not finite if that prevented saving, or ""."""
        self.wait()
        if not self._asynchronous:
            done(write(snapshot, folder, self._world, only_finite=True))
            return
        self._stage(snapshot)
        self._saving = self._thread.submit(self._run, snapshot, folder, done)

    def _run(self, snapshot: Snapshot, folder: Path, done: Callable[[str], None]) -> None:
        if sys.platform == "linux":  # where every thread has its own priority
            least = os.getpriority(os.PRIO_PROCESS, 0)  # of the training; only root may go below it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), max(least, NICE))
        try:
            done(write(snapshot, folder, self._world, only_finite=True))
        except BaseException as error:
            log.error("saving %s in the background failed: %s", folder, error)
            raise

    def _stage(self, snapshot: Snapshot) -> None:
        if self._room is not None:
            self._room.result()
        for name, piece in snapshot.pieces.items():
            snapshot.pieces[name] = replace(piece, tensor=self._copied(name, piece.tensor))
        snapshot.own = {name: self._copied(name, t) for name, t in snapshot.own.items()}

    def _copied(self, name: str, t: Tensor) -> Tensor:
        room = self._staging.get(name)
        if room is None or room.shape != t.shape or room.dtype is not t.dtype:
            room = self._staging[name] = torch.empty(t.shape, dtype=t.dtype)
        return room.copy_(t.detach())

    def check(self) -> None:
        """Raise the error of a failed background save."""
        if not self.busy:
            self.wait()

    def wait(self) -> None:
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()
