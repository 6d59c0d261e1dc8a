"""Which rank died, has left or is elsewhere? The network only says "Connection closed by peer"; this names the rank.

    heartbeat   each rank writes to the store twice a second; a rank whose number stands still is lost
    farewell    a rank that ends normally writes down after how many rounds; the others read it when they fail
    meeting     a rank that enters a call which all ranks must make writes that down, and waits for the others

The first rank to find others lost writes it down for all, because ranks that gave up stand still too.
"""

from __future__ import annotations

import atexit
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any

import torch.distributed as dist

from fleetx.comm.session import current
from fleetx.comm.world import World
from fleetx.errors import FleetxError, UsageError, WorldError

BEAT = 0.5  # seconds between two heartbeats
POLL = 0.02  # seconds between two looks at where the others are
PATIENCE = 2.5  # seconds without one, until a rank counts as lost
_VERDICT = "fleetx/lost"


def watch(world: World) -> None:
    """From now on, leave a farewell at exit, and explain errors that a rank caused by leaving early."""
    session = current()
    if session.peers is None and world.size > 1:
        session.peers = Peers(world)


def start_heartbeat() -> None:
    if (peers := current().peers) is not None:
        peers.start_heartbeat()


def meet(call: str, *, otherwise: str = "", ranks: Sequence[int] | None = None) -> None:
    """Wait until every rank, or each of these, makes this call; raise an error within seconds if one does not.

    otherwise: what to do if another rank trains on.
    """
    if (peers := current().peers) is not None:
        otherwise = otherwise or f"every rank must call {call}, so do not call it under `if fleet.is_first_worker()`"
        peers.meet(call, otherwise, ranks)


def lost() -> list[int]:
    """The ranks that are lost. Takes a few seconds."""
    peers = current().peers
    return peers.heartbeat.lost() if peers is not None and peers.heartbeat is not None else []


class Peers:
    """What this rank tells the others, and what it learns about them, through the store of the process group."""

    def __init__(self, world: World):
        self._world = world
        self._store = dist.distributed_c10d._get_default_store()
        self._failed: list[BaseException] = []
        self._calls: dict[str, int] = {}  # of `meet`, by who meets
        self._last: dict[str, str] = {}  # the counter of the last meeting, by who meets
        # What another training wrote into the same store is out of date.
        self._store.set(f"fleetx/beat/{world.rank}", "0 0")
        if world.rank == 0:
            self._store.set("fleetx/session", secrets.token_hex(4))
        self.heartbeat: Heartbeat | None = None
        self._excepthook = sys.excepthook
        sys.excepthook = self
        # After the process group was made, so that it runs before the group is destroyed.
        atexit.register(self._say_farewell)

    def start_heartbeat(self) -> None:
        if self.heartbeat is None:
            store = self._store.clone() if hasattr(self._store, "clone") else self._store
            self.heartbeat = Heartbeat(self._world, store)
            atexit.register(self.heartbeat.stop)

    def stop(self) -> None:
        """Undo everything: for `fleet.release` of the last model."""
        if self.heartbeat is not None:
            self.heartbeat.stop()
            atexit.unregister(self.heartbeat.stop)
        atexit.unregister(self._say_farewell)
        if sys.excepthook is self:
            sys.excepthook = self._excepthook

    @property
    def failed(self) -> bool:
        """Did the script end with an error?"""
        return bool(self._failed)

    def annotate(self, error: BaseException) -> None:
        """Add to an error which ranks have left. fleetrun calls it too: it reports errors before Python does."""
        self._failed.append(error)
        if isinstance(error, RuntimeError) and (note := _try(self._who_left)):
            error.add_note(note)

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """The excepthook."""
        if error not in self._failed:
            self.annotate(error)
        self._excepthook(kind, error, traceback)

    def meet(self, call: str, otherwise: str, ranks: Sequence[int] | None) -> None:
        who = "all" if ranks is None else f"{ranks[0]}+{len(ranks)}"
        ranks = range(self._world.size) if ranks is None else ranks
        number = self._calls[who] = self._calls.get(who, 0) + 1
        self._store.set(f"{self._session}/call/{who}/{self._world.rank}", f"{number} {call}")
        count = f"{self._session}/met/{who}/{number}/{call}"  # one number to ask for, whatever the size of the world
        self._store.add(count, 1)
        try:
            self._wait_for_all(call, otherwise, ranks, who, count)
        except FleetxError:
            self._store.add(count, -1)
            self._calls[who] -= 1  # this one does not take place
            raise
        if ranks[0] == self._world.rank and who in self._last:  # everyone has left the last one
            self._store.delete_key(self._last[who])
        self._last[who] = count

    @cached_property
    def _session(self) -> str:
        """Distinguishes this training from others in the same store. Rank 0 has written it before `distribute` ends."""
        return f"fleetx/{self._store.get('fleetx/session').decode()}"

    def _wait_for_all(self, call: str, otherwise: str, ranks: Sequence[int], who: str, count: str) -> None:
        start, pause, here = time.monotonic(), 0.0002, self._world.rank
        while self._store.add(count, 0) < len(ranks):
            waited = time.monotonic() - start
            if waited > self._world.timeout.total_seconds():
                raise WorldError(
                    f"rank {here} waited {self._world.timeout} in {call} for the others: every rank must call it"
                )
            if waited > BEAT:  # all is well in most cases: look at each rank only now
                problem = next(filter(None, (self._elsewhere(rank, call, otherwise, who) for rank in ranks)), "")
                if problem and self._store.add(count, 0) < len(ranks):  # they have not come meanwhile
                    raise UsageError(problem)
            time.sleep(pause)
            pause = min(2 * pause, POLL)

    def _elsewhere(self, rank: int, call: str, otherwise: str, who: str) -> str:
        """What another rank does instead of making this call; empty while it may still come."""
        key = f"{self._session}/call/{who}/{rank}"
        number, _, name = (self._store.get(key).decode() if self._store.check([key]) else "0 none").partition(" ")
        where = f"rank {self._world.rank} is in {call}, but rank {rank}"
        if int(number) == self._calls[who] and name != call:
            return f"{where} is in {name}: every rank must make the same calls in order"
        if int(number) >= self._calls[who]:
            return ""
        if self._store.check([f"fleetx/left/{rank}"]):
            return f"{where} has ended: every rank must call {call}"
        if int(self._store.get(f"fleetx/beat/{rank}").split()[1]) > current().progress:
            return f"{where} trains on without calling it: {otherwise}"
        return ""

    def _say_farewell(self) -> None:
        if not self._failed:
            _try(lambda: self._store.set(f"fleetx/left/{self._world.rank}", str(_rounds())))

    def _who_left(self) -> str:
        here = self._world.rank
        left = [rank for rank in range(self._world.size) if rank != here and self._store.check([f"fleetx/left/{rank}"])]
        if not left:
            return ""
        who = ", ".join(f"rank {rank} after {int(self._store.get(f'fleetx/left/{rank}'))} updates" for rank in left)
        return (
            f"fleetx: the script had already ended on {who}, while rank {here} continued after {_rounds()}. If the "
            "ranks have different numbers of batches, `for batch in fleet.join(loader)` stops all of them together"
        )


class Heartbeat:
    """The heartbeat of this rank, and those of the others."""

    def __init__(self, world: World, store: Any):
        self._world, self._store = world, store
        self._stopped = threading.Event()
        self._verdict: list[int] = []  # the ranks found lost, here or elsewhere
        self._beat(0)
        self._thread = threading.Thread(target=self._run, name="fleetx-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stopped.wait(BEAT):
            number += 1
            try:
                self._beat(number)
            except Exception:  # the process that kept the store is gone
                return

    def _beat(self, number: int) -> None:
        self._store.set(f"fleetx/beat/{self._world.rank}", f"{number} {current().progress}")
        if not self._verdict and self._store.check([_VERDICT]):  # read it now: the store may be gone later
            self._verdict = [int(n) for n in self._store.get(_VERDICT).decode().split(",")]

    def lost(self) -> list[int]:
        try:
            before = self._beats()
            time.sleep(PATIENCE)
            gone = [rank for rank, beat in self._beats().items() if before.get(rank) == beat]
            gone = [rank for rank in gone if rank != self._world.rank]
            if not self._verdict and gone:
                self._store.set(_VERDICT, ",".join(map(str, gone)))
                time.sleep(2 * BEAT)  # until all ranks have read it
            return self._verdict or gone
        except Exception:
            return self._verdict or [0]  # rank 0, or its launcher, keeps the store

    def _beats(self) -> dict[int, bytes]:
        keys = {rank: f"fleetx/beat/{rank}" for rank in range(self._world.size)}
        return {rank: self._store.get(key) for rank, key in keys.items() if self._store.check([key])}

    def stop(self) -> None:
        """Before Python ends: a thread that it finds inside C++ would abort the process."""
        self._stopped.set()
        self._thread.join(timeout=2 * PATIENCE)


def _rounds() -> int:
    engine = current().last()
    return engine.round if engine is not None else 0


def _try(call: Callable[[], Any]) -> Any:
    """The store may be gone with the process that kept it; then nothing can be said."""
    try:
        return call()
    except Exception:
        return None
