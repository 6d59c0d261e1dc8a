"""Which rank died, has left or is elsewhere? The network only says "Connection closed by peer"; this names the rank.

    heartbeat   a process beside each rank watches it and hears about the others (`watcher.py`, `watch.py`)
    farewell    a rank that ends tells the others: after how many updates, or with which error
    meeting     a rank that enters a call that all ranks must make records it, and waits for the others

A network error becomes a WorldError that names the rank: where fleetx can catch it (`naming`), or else when it leaves
the script.
"""

from __future__ import annotations

import atexit
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from traceback import walk_tb
from types import TracebackType

from fleetx.base import seams
from fleetx.base.user_line import is_users
from fleetx.comm import alarm, debug, watch
from fleetx.comm.session import current
from fleetx.comm.world import World
from fleetx.errors import FleetxError, UsageError, WorldError

EVALUATION = "an evaluation"  # a call of no function of fleetx
POLL = 0.02  # seconds between checks of where the others are
ASK = 0.5  # seconds between requests for the progress of the others
PATIENCE = 40.0  # seconds for the other ranks to answer after a network error; usually it takes milliseconds


def start(world: World) -> None:
    """From now on, watch the other ranks, tell them how this one ends, and explain errors that another one caused."""
    session = current()
    if session.peers is None and world.size > 1:
        session.peers = Peers(world)
    debug.start(world.timeout)


def meet(call: str, *, otherwise: str = "", ranks: Sequence[int] | None = None) -> None:
    """Wait until every rank, or each of `ranks`, makes this call; raise an error within seconds if one does not.

    otherwise: the error's advice if another rank continues to train instead, or has ended.
    """
    if (peers := current().peers) is not None:
        otherwise = otherwise or f"every rank must call {call}, so do not call it under `if fleet.is_first_worker()`"
        peers.meet(call, otherwise, ranks)


def announce(call: str) -> None:
    """Record that this rank is about to wait in a call that others may not make: ranks that wait elsewhere see it."""
    if (peers := current().peers) is not None:
        peers.announce(call)


@contextmanager
def naming() -> Iterator[None]:
    """Turn a network error into one that names the rank that caused it."""
    try:
        yield
    except FleetxError:
        raise
    except RuntimeError as error:
        peers = current().peers
        named = peers.explained(error) if peers is not None else error
        if named is error:
            raise
        raise named from error


class Peers:
    """What this rank tells the others, and what it learns about them."""

    def __init__(self, world: World):
        self._world = world
        self._watch = watch.of(world)
        # Any progress that the others remember from an earlier session counts as less than any in this one.
        self._base = watch.next_session() << 40
        self._store = seams.default_store()
        self._errors: list[tuple[BaseException, BaseException]] = []  # that left the script, and what is reported
        self._said: set[int] = set()  # ids of the errors that the others were told of
        self._calls: dict[str, int] = {}  # how many times `meet` was called, by who meets
        self._last: dict[str, str] = {}  # the counter of the last meeting, by who meets
        if world.rank == 0:
            self._store.set("fleetx/session", secrets.token_hex(4))  # outdates what other trainings wrote
        self._excepthook, self._pid = sys.excepthook, os.getpid()
        sys.excepthook = self
        # Registered after the process group was made, so that it runs before the group is destroyed.
        atexit.register(self._say_farewell)

    def mark(self, progress: int, steps: int, doing: str) -> None:
        if self._watch is not None:
            self._watch.mark(self._base + progress, steps, doing)

    def stop(self) -> None:
        """Undo everything when `fleet.release` releases the last model. Only the watcher runs until Python exits."""
        self.mark(current().progress, current().steps, "")
        atexit.unregister(self._say_farewell)
        if sys.excepthook is self:
            sys.excepthook = self._excepthook

    def check(self) -> None:
        """Raise an error if a rank is lost, before this one waits for it."""
        if self._watch is not None and self._watch.verdict is not None:
            raise _caused(self._watch.explained(), "follows")

    @property
    def failed(self) -> bool:
        """Did the script end with an error?"""
        return bool(self._errors)

    # --- errors -----------------------------------------------------------------------------------
    def explained(self, error: BaseException) -> BaseException:
        """The error itself, or a WorldError that names the rank that caused it."""
        seen = self._watch
        if seen is None or not alarm.is_network(error):
            return error
        seen.ask(PATIENCE)
        here, said = self._world.rank, alarm.saw(error)
        if seen.verdict is not None:
            return _caused(f"{seen.explained()} [{said}]", "follows")
        if seen.left:
            return _caused(f"{alarm.ended(seen.left, here=here, updates=_updates())} [{said}]", "follows")
        if alarm.is_timeout(error) and seen.waiting is not None:
            return _caused(f"{alarm.late(seen.waiting, here=here, doing='')} [{said}]", "gave up")
        return _caused(
            f"{alarm.unexplained(seen.doing, here=here, timeout=alarm.is_timeout(error))} [{said}]", "gave up"
        )

    def leaving(self, error: BaseException) -> BaseException:
        """What to report for an error that leaves the script.

        fleetrun also calls this, and records the error before the excepthook tells the others: their errors follow from
        this one, and must not be found without it.
        """
        known = next((named for one, named in self._errors if error in (one, named)), None)
        if known is not None:
            return known
        alarm.add_hint(error)
        named = self.explained(error)
        if named is not error:
            named.__traceback__, named.__suppress_context__ = error.__traceback__, True
        self._errors.append((error, named))
        current().note("fault", _short(named))
        if self._watch is not None and os.getpid() == self._pid:
            self._watch.told.set()
        return named

    def _tell(self, named: BaseException) -> None:
        if self._watch is not None and os.getpid() == self._pid and id(named) not in self._said:
            self._said.add(id(named))
            how = getattr(named, "last_words", "raised")
            self._watch.say({how: _short(named) if how == "raised" else str(named)})

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """The excepthook."""
        named = self.leaving(error)
        self._tell(named)
        self._excepthook(type(named), named, traceback)

    def _say_farewell(self) -> None:
        if self._watch is not None and os.getpid() == self._pid:
            if not self._errors:
                self._watch.say({"left": _updates()})
            self._watch.close()

    # --- meetings ---------------------------------------------------------------------------------
    def meet(self, call: str, otherwise: str, ranks: Sequence[int] | None) -> None:
        who = "all" if ranks is None else f"{ranks[0]}+{len(ranks)}"
        ranks = range(self._world.size) if ranks is None else ranks
        self.announce(call, who)
        number = self._calls[who] = self._calls.get(who, 0) + 1
        count = f"{self._session}/met/{who}/{number}/{call}"  # a single counter to poll, whatever the size of the world
        self._store.add(count, 1)
        current().mark(call)
        try:
            self._wait_for_all(call, otherwise, ranks, who, count)
        except FleetxError:
            self._store.add(count, -1)
            self._calls[who] -= 1  # this meeting does not take place
            raise
        if ranks[0] == self._world.rank and who in self._last:  # everyone has left the last meeting
            self._store.delete_key(self._last[who])
        self._last[who] = count

    def announce(self, call: str, who: str = "all") -> None:
        self._store.set(f"{self._session}/call/{who}/{self._world.rank}", f"{self._calls.get(who, 0) + 1} {call}")

    @cached_property
    def _session(self) -> str:
        """Distinguishes this training from others in the same store. Rank 0 has written it before `distribute` ends."""
        return f"fleetx/{self._store.get('fleetx/session').decode()}"

    def _wait_for_all(self, call: str, otherwise: str, ranks: Sequence[int], who: str, count: str) -> None:
        start, pause, here, asked = time.monotonic(), 0.0002, self._world.rank, 0.0
        while self._store.add(count, 0) < len(ranks):
            self.check()
            waited = time.monotonic() - start
            if waited > self._world.timeout.total_seconds():
                raise WorldError(
                    f"rank {here} waited {self._world.timeout} in {call} for the others: every rank must call it"
                )
            if waited > ASK:  # usually all is well: look at each rank only now
                problem = next(filter(None, (self._elsewhere(rank, call, otherwise, who) for rank in ranks)), "")
                if problem and self._store.add(count, 0) < len(ranks):  # they still have not come
                    raise UsageError(problem)
                if self._watch is not None and waited - asked > ASK:
                    asked = waited
                    self._watch.say({"ask": True})
            time.sleep(pause)
            pause = min(2 * pause, POLL)

    def _elsewhere(self, rank: int, call: str, otherwise: str, who: str) -> str:
        """What another rank does instead of making this call; empty while it may still make it."""
        key = f"{self._session}/call/{who}/{rank}"
        number, _, name = (self._store.get(key).decode() if self._store.check([key]) else "0 none").partition(" ")
        where = f"rank {self._world.rank} {_doing(call)}, but rank {rank}"
        if int(number) == self._calls[who] and name != call:
            return f"{where} {_doing(name)}: every rank must make the same calls in order"
        if int(number) >= self._calls[who] or self._watch is None:
            return ""
        if rank in self._watch.left:
            return f"{where} has ended: {otherwise}"
        if self._watch.table.get(rank, 0) > self._base + current().progress:
            return f"{where} has continued training: {otherwise}"
        return ""


def _doing(call: str) -> str:
    return "is evaluating" if call == EVALUATION else f"is in {call}"


def _caused(text: str, last_words: str) -> WorldError:
    """An error on this rank that another rank caused. The others are not told that this rank raised it."""
    error = WorldError(text)
    error.last_words = last_words  # type: ignore[attr-defined]
    return error


def _short(error: BaseException) -> str:
    """`ValueError: bad (train.py:12)`, for the other ranks."""
    try:
        text = f"{type(error).__name__}: {error}".rstrip(": ")
    except Exception:  # from its own __str__
        text = type(error).__name__
    first = text.strip().splitlines()[0]
    return f"{first[:500]}{_where(error.__traceback__)}"


def _where(traceback: TracebackType | None) -> str:
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(traceback) if is_users(frame)]
    return f" ({os.path.basename(places[-1][0])}:{places[-1][1]})" if places else ""


def _updates() -> int:
    engine = current().last()
    return engine.round if engine is not None else 0
