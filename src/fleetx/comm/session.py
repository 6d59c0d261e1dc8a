"""The session of this process: the world it joined, the strategy it declared, and the models it trains.

Everything that fleetx remembers about them between two calls of a training script is in the object that `current()`
returns. What belongs to something that outlives a session is kept beside that: to the process group, the groups made
from it (`comm/world.py`) and the number of data comparisons (`data/rank_share.py`); to the process, its watcher
(`comm/watch.py`), its handler of SIGTERM, the checkpoint folders that it holds, and caches; to torch, what is replaced
while a model is distributed (`engine/guests.py`) and autocast's kernels (`parts/amp/op_lists.py`).
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fleetx.base.user_line import SourceLine, warn
from fleetx.errors import UsageError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from fleetx.comm.world import World
    from fleetx.strategy import DistributedStrategy


Undone = tuple[str, SourceLine | None]  # what a training left undone, and where it was distributed


@dataclass
class Entry:
    """What belongs to one engine."""

    strategy: DistributedStrategy
    batch_plan: Any = None  # how `auto` or `batch` splits the batch


@dataclass
class Session:
    world: World | None = None
    strategy: DistributedStrategy | None = None  # given to fleet.init
    entries: weakref.WeakKeyDictionary[Any, Entry] = field(default_factory=weakref.WeakKeyDictionary)
    pending: dict[str, Any] = field(default_factory=dict)  # given to distributed_model and distributed_optimizer
    stepped: weakref.ref[Any] | None = None  # the engine of the last optimizer.step()
    steps: int = 0  # of all optimizers together; the same number on all ranks
    inside: int = 0  # since the last step: forwards and backwards in which the ranks communicate
    unfinished: list[Undone] = field(default_factory=list)  # left by models that are gone
    checks: Any = None  # what `fleet.init` was given, or the defaults: `engine.numbers.Checks`
    peers: Any = None  # `comm.peers`: which rank is alive, which has left
    recorder: Any = None  # `record.recorder`: what happens in this run; None: not recorded
    application: weakref.ref[Any] | None = None  # created last; a static script means its programs
    script: Any = None  # what a Paddle script has created and set: `paddle.static.programs`

    @property
    def progress(self) -> int:
        """Grows with the training. Ranks that are at the same call of the script have the same progress."""
        return (self.steps << 20) + self.inside

    def mark(self, doing: str, *, inside: bool = False, run: Any = None) -> None:
        """Show the other ranks what this rank is doing now.

        inside: do the ranks communicate in it?
        run: the training whose batch enters the model, or whose step is done.
        """
        self.inside += inside
        self._show(doing, self.steps, run)

    def begin_step(self) -> None:
        """optimizer.step() begins."""
        self.steps, self.inside = self.steps + 1, 0
        self._show("optimizer.step", self.steps - 1, None)

    def _show(self, doing: str, steps: int, run: Any) -> None:
        if self.recorder is not None:
            self.recorder.mark(doing, run)
        if self.peers is not None:
            self.peers.mark(self.progress, steps, doing)
            self.peers.check()

    def gradient(self, run: Any) -> None:
        """Record that the gradients of a round are final."""
        if self.recorder is not None:
            self.recorder.gradient(run)

    def note(self, what: str, text: str = "") -> None:
        """Add a note to the record of this run."""
        if self.recorder is not None:
            self.recorder.note(what, text)

    def here(self) -> World:
        if self.world is None:
            raise UsageError("fleet.init() has not been called: call it first")
        return self.world

    def find(self, which: Any = None, *, by: str = "model") -> Any:
        """The engine of a model or an optimizer; without an argument, the only engine there is.

        by: what the caller can pass to choose one.
        """
        if which is not None:
            for engine in self.entries:
                if which is engine.model or which is engine.optimizer:
                    return engine
            raise UsageError(
                "this model or optimizer has not been passed to fleet.distribute: pass the objects that "
                "fleet.distribute returned, not a compiled wrapper"
            )
        if len(self.entries) > 1:
            gc.collect()  # old models that only a reference cycle keeps alive
        if not self.entries:
            both = " (distributed_model and distributed_optimizer must both be called)" if self.pending else ""
            raise UsageError(
                f"nothing is distributed yet: call fleet.distribute(model, optimizer, strategy) first{both}"
            )
        if len(self.entries) > 1:
            raise UsageError(f"{len(self.entries)} models are distributed: pass {by}=... to choose one")
        return next(iter(self.entries))

    def check_not_distributed(self, model: nn.Module, optimizer: Optimizer) -> None:
        if any(engine.model is model or engine.optimizer is optimizer for engine in self.entries):
            raise UsageError("this model or optimizer is distributed already: call fleet.release(model) first")

    def shares(self) -> set[tuple[int, int]]:
        """(replica index, number of replicas) of each distributed model."""
        groups = [engine.layout.replica_group for engine in list(self.entries)]
        return {(group.rank, group.size) for group in groups}

    def last(self) -> Any:
        """The engine of the last optimizer.step(), or None."""
        return self.stepped() if self.stepped is not None else None

    def updated(self, optimizer: Optimizer) -> bool:
        """Did the last step() of this optimizer apply an update? Without a strategy, every step does."""
        return next((engine.updated for engine in list(self.entries) if engine.optimizer is optimizer), True)

    def remove(self, engine: Any) -> None:
        del self.entries[engine]
        if not self.entries and self.peers is not None:
            self.peers.stop()
            self.peers = None

    def close(self) -> None:
        """Release what holds the process group: a reducer that holds it when Python exits may abort the process."""
        self._tell_unfinished()
        self.stop_recording()
        for engine in list(self.entries):
            engine.close()
        gc.collect()

    def stop_recording(self) -> None:
        if self.recorder is not None:
            self.recorder.close()
        self.recorder = None

    def _tell_unfinished(self) -> None:
        """Warn if a script ends without an error but loses its last steps, for lack of fleet.flush()."""
        failed = hasattr(sys, "last_value") or (self.peers is not None and self.peers.failed)
        left = self.unfinished + [undone for engine in list(self.entries) for undone in engine.unfinished()]
        if self.world is not None and self.world.rank == 0 and not failed:
            for text, line in dict(left).items():
                warn(f"the script ends {text}. Call fleet.flush() at the end of the data", line=line)
        self.unfinished = []


_session = Session()


def current() -> Session:
    return _session


Call = TypeVar("Call", bound=Callable[..., Any])


def waits(call: Call) -> Call:
    """Decorate a function in which this rank waits for others: its time goes into the record of the run."""

    @functools.wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        recorder = _session.recorder
        if recorder is None:
            return call(*args, **kwargs)
        start = recorder.now()
        try:
            return call(*args, **kwargs)
        finally:
            recorder.waited(start, call.__name__)

    return cast("Call", timed)


def close() -> None:
    """At exit."""
    _session.close()


def reset() -> None:
    """Forget everything, without leaving the process group. For tests and forked processes."""
    global _session
    _session.stop_recording()
    if _session.peers is not None:
        _session.peers.stop()
    _session = Session()
