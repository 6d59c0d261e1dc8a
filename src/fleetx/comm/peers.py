"""Which rank is gone? What the network says of a dead peer is "Connection closed by peer", which names nobody.

Each rank leaves a sign in the store twice a second. Who finds the others silent looks twice, and names those whose sign
did not change; the first to do so writes it down for all, because ranks that gave up are silent too.
"""

from __future__ import annotations

import atexit
import threading
import time
from typing import Any

import torch.distributed as dist

from fleetx.comm.world import World

BEAT = 0.5  # seconds between two signs
PATIENCE = 2.5  # seconds without one
_VERDICT = "fleetx/lost"
_line: Lifeline | None = None


class Lifeline:
    """The sign of this rank, and those of the others."""

    def __init__(self, world: World, store: Any):
        self._world, self._store = world, store
        self._ended = threading.Event()
        self._verdict: list[int] = []  # who was found lost, here or elsewhere
        self._beat(0)
        self._thread = threading.Thread(target=self._go_on, name="fleetx lifeline", daemon=True)
        self._thread.start()

    def _go_on(self) -> None:
        number = 0
        while not self._ended.wait(BEAT):
            number += 1
            try:
                self._beat(number)
            except Exception:  # the store is gone, and with it whoever kept it
                return

    def _beat(self, number: int) -> None:
        self._store.set(f"fleetx/sign/{self._world.rank}", str(number))
        if not self._verdict and self._store.check([_VERDICT]):  # who keeps the store may be gone when it is needed
            self._verdict = _numbers(self._store.get(_VERDICT))

    def lost(self) -> list[int]:
        """The ranks that are gone. It takes some seconds."""
        try:
            before = self._signs()
            time.sleep(PATIENCE)
            gone = [rank for rank, sign in self._signs().items() if before.get(rank) == sign]
            gone = [rank for rank in gone if rank != self._world.rank]
            if not self._verdict and gone:
                self._store.set(_VERDICT, ",".join(map(str, gone)))
                time.sleep(2 * BEAT)  # until everybody has read it
            return self._verdict or gone
        except Exception:
            return self._verdict or [0]  # who keeps the store, or whose launcher does

    def _signs(self) -> dict[int, bytes]:
        keys = {rank: f"fleetx/sign/{rank}" for rank in range(self._world.size)}
        return {rank: self._store.get(key) for rank, key in keys.items() if self._store.check([key])}

    def end(self) -> None:
        """Before Python ends: a thread that it finds inside of C++ would abort the process."""
        self._ended.set()
        self._thread.join(timeout=2 * PATIENCE)


def _numbers(text: bytes) -> list[int]:
    return [int(n) for n in text.decode().split(",")]


def watch(world: World) -> None:
    """From now on this rank gives signs."""
    global _line
    if _line is None and world.size > 1:
        store = dist.distributed_c10d._get_default_store()
        _line = Lifeline(world, store.clone() if hasattr(store, "clone") else store)
        atexit.register(_line.end)


def lost() -> list[int]:
    return _line.lost() if _line is not None else []
