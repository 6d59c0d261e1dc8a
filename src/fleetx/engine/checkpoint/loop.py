"""`fleet.checkpoints`: a loop that resumes by itself, and saves on schedule and when it is asked to end."""

from __future__ import annotations

import contextlib
import copy
import logging
import shutil
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fleetx.comm import peers
from fleetx.comm.session import current
from fleetx.engine.checkpoint import folders
from fleetx.engine.checkpoint.back import Back
from fleetx.engine.checkpoint.background import Saver
from fleetx.engine.checkpoint.read import read as load
from fleetx.engine.checkpoint.snapshot import Extras, pieces, take
from fleetx.engine.checkpoint.term import STOPPED, Term
from fleetx.engine.checkpoint.together import on_first, together
from fleetx.engine.checkpoint.write import check_shared
from fleetx.engine.engine import Engine
from fleetx.errors import CheckpointError, UsageError

log = logging.getLogger(__name__)

_LOOK = 1.0  # seconds between checks whether any rank was asked to end
_MOST = 64  # steps between them, at most


class Checkpoints:
    """Made on every rank, after fleet.distribute. `step` counts the steps of the whole training, resumed or not.

        for step in fleet.checkpoints("run", every=100, steps=10_000):
            ...

    or, in any other loop, with a call after each step:

        with fleet.checkpoints("run", every=100, loader=loader) as checkpoints:
            for batch in loader:
                ...
                checkpoints.stepped()
    """

    def __init__(
        self,
        engine: Engine,
        root: Path,
        strategy: Mapping[str, Any],
        *,
        every: int,
        keep: int,
        steps: int | None,
        extras: Extras,
        asynchronous: bool,
        when_busy: str,
    ):
        _check(every, keep, steps, extras.extra, when_busy)
        self._engine, self._root, self._strategy = engine, root, strategy
        self._every, self._keep, self._steps, self._skips = every, keep, steps, when_busy == "skip"
        self._extras = extras
        self._bad: set[str] = set()
        self._due = False
        self._roomy = not asynchronous  # is memory for the copies allocated?
        self._last = -1  # the step that was saved last
        self._newest = "none"  # the last good checkpoint
        self.resumed: Path | None = None  # the checkpoint that this run resumed from
        self.restored: Path | None = None  # the one that it restored after numbers went wrong
        self._release: Callable[[], object] = lambda: None
        self._resume()
        self._boundary: dict[str, Any] | None = None
        self._note_boundary()
        self._saver = Saver(engine.world, asynchronous=asynchronous)
        self._term = Term()
        self._back = Back(engine, extras)
        self._look_at, self._looked, self._pause = self.step + 1, time.monotonic(), 1

    @property
    def step(self) -> int:
        """Steps done so far."""
        return self._extras.step

    def __length_hint__(self) -> int:
        """Steps that are left, for `fleet.progress`; 0 if unknown."""
        return max((self._steps or 0) - self.step, 0)

    def __iter__(self) -> Iterator[int]:
        with self:
            while self._steps is None or self.step < self._steps:
                yield self.step
                self.stepped()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """After the last step, save it. After an error, only end what is running: other ranks may be elsewhere."""
        if kind is None:
            try:
                if self._last != self.step:
                    self.save()
            finally:
                self.close()
        else:
            with contextlib.suppress(Exception):  # from the background; it was logged
                self.close()

    def stepped(self) -> None:
        """Call this after each step: saves if it is time to, and ends the process if any rank got SIGTERM."""
        self._saver.check()
        if not self._roomy:  # after the first step the optimizer has its state
            self._roomy = True
            self._saver.make_room(pieces(self._engine))
        self._extras.step += 1
        self._back.stepped()
        self._note_boundary()
        self._due = self._due or self.step % self._every == 0
        stop = self._asked_to_stop()
        if self._back.now:
            self._go_back()
        # Inside a merge window only the same ranks can resume exactly, so a regular save waits for its end.
        if stop or (self._due and self._engine.merged == 0 and not self._skipped()):
            self.save(sync=stop)
        if stop:
            self.close()
            if self._engine.world.rank == 0:
                log.warning(
                    "SIGTERM: training ends after step %d; the newest checkpoint is %s", self.step, self._newest
                )
            raise SystemExit(STOPPED)

    def save(self, *, sync: bool = False) -> None:
        """Save now. Every rank must call it. sync: wait until it is on disk."""
        self._due, self._last = False, self.step
        snapshot = take(self._engine, self._extras, self._strategy, self._boundary)
        folder = folders.of_step(self._root, self.step)
        self._saver.save(snapshot, folder, partial(self._saved, folder))
        if sync:
            self._saver.wait()

    def close(self) -> None:
        """Wait for a background save, and restore the SIGTERM handler."""
        self._back.close()
        self._term.restore()
        try:
            self._saver.wait()
        finally:
            self._release()

    # --- resuming ---------------------------------------------------------------------------------
    def _resume(self) -> None:
        peers.meet("fleet.checkpoints")
        self._check_root()
        self.resumed, bad = self._try_each(self._read)
        if self.resumed is not None:
            self._last, self._newest = self.step, self.resumed.name
            current().note("resumed", self.resumed.name)
        elif bad:  # starting from the beginning would in time prune what may still be rescued
            raise CheckpointError(
                self._root,
                f"no checkpoint there can be used: {'; '.join(bad)}. To start from the beginning, remove this folder",
            )

    def _check_root(self) -> None:
        """Check that rank 0 can write there and the others see it: better now than at the first save."""
        world, root = self._engine.world, self._root
        token = on_first(world, root, self._claimed)
        try:
            together(world, root, lambda: check_shared(root / token, world))
        finally:
            if world.rank == 0:
                shutil.rmtree(root / token, ignore_errors=True)

    def _claimed(self) -> str:
        self._root.mkdir(parents=True, exist_ok=True)
        self._release = weakref.finalize(self, folders.release, folders.claim(self._root))
        return folders.try_out(self._root)

    def _go_back(self) -> None:
        """The numbers went wrong: restore the last good checkpoint. Steps, data and random numbers continue."""
        self._saver.wait()
        found, _ = self._try_each(self._back.read)
        self._back.done(found)
        self.restored = found
        current().note("restored", found.name if found is not None else "")
        self._note_boundary()

    def _try_each(self, read: Callable[[Path], None]) -> tuple[Path | None, list[str]]:
        """Read the newest good checkpoint. Returns it, and why others cannot be used."""
        world, root = self._engine.world, self._root
        found, bad = on_first(world, root, self._candidates)
        for name in found:
            try:
                read(root / name)
            except CheckpointError as error:
                self._bad.add(name)
                bad.append(str(error))
                if world.rank == 0:
                    folders.say_bad(root / name, error, last=name == found[-1])
            else:
                return root / name, bad
        return None, bad

    def _candidates(self) -> list[list[str]]:
        folders.remove_unfinished(self._root)
        found, bad = folders.candidates(self._root)
        return [[folder.name for folder in found], bad]

    def _read(self, folder: Path) -> None:
        training = load(self._engine, folder, self._extras)
        # If the number of steps per update has changed, the same updates correspond to a different number of steps.
        self._extras.step = self._extras.step * self._engine.window() // training.window

    def _note_boundary(self) -> None:
        """Note where a different number of ranks can resume, given a checkpoint from inside a merge window."""
        if self._engine.merged == 0:
            loader = self._extras.loader
            state = None if loader is None else loader.state_dict()
            if self._engine.window() > 1:  # it may be the loader's own dict, which changes during the window
                state = copy.deepcopy(state)
            self._boundary = {"step": self.step, "loader": state}

    # --- saving -----------------------------------------------------------------------------------
    def _saved(self, folder: Path, poisoned: str) -> None:
        """Called after a save, possibly in the background while a later step waits to be saved."""
        first = self._engine.world.rank == 0
        if poisoned:
            if first:
                why = "is not saved, and older checkpoints are kept: %s is not finite"
                log.warning(f"%s {why}", folder.name, poisoned)
            return
        self._bad.discard(folder.name)
        self._newest = folder.name
        current().note("checkpoint", folder.name)
        if first and self._keep:
            try:
                folders.prune(self._root, self._keep, self._bad)
            except OSError as error:  # what was just saved is good, and the other ranks continue
                log.warning("%s: old checkpoints could not be removed: %s", self._root, error)

    def _skipped(self) -> bool:
        """Is a background save still running on some rank, so that this one is skipped?"""
        if not self._skips:
            return False
        skip = self._engine.world.largest(self._saver.busy) > 0
        self._due = self._due and not skip
        return skip

    def _asked_to_stop(self) -> bool:
        """Did any rank get SIGTERM? The ranks ask each other about once a second, all after the same step."""
        if self.step < self._look_at:
            return False
        now = time.monotonic()
        wanted = int(self._pause * _LOOK / max(now - self._looked, 1e-9))
        pause = min(max(wanted, 1), 2 * self._pause, _MOST) if self._engine.world.rank == 0 else 0
        mine = [int(self._term.asked), pause, int(self._back.wanted)]
        answer = torch.tensor(mine, device=self._engine.world.device)
        self._engine.world.maximum(answer)
        stop, self._pause, back = answer.tolist()
        self._back.now = self._back.now or bool(back)
        self._looked, self._look_at = now, self.step + self._pause
        return bool(stop)


def _check(every: int, keep: int, steps: int | None, extra: Any, when_busy: str) -> None:
    for name, value, least in (("every", every, 1), ("keep", keep, 0), ("steps", steps, 0)):
        if value is not None and (type(value) is not int or value < least):
            raise UsageError(f"{name} = {value!r}: must be a whole number of at least {least}")
    if extra is not None and not isinstance(extra, dict):
        raise UsageError(
            f"extra must be a dict, which resuming fills with the saved values, not a {type(extra).__name__}"
        )
    if when_busy not in ("wait", "skip"):
        raise UsageError(f'when_busy = {when_busy!r}: must be "wait" or "skip"')
