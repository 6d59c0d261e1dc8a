"""Restore the last good checkpoint after gradients that were not finite (`Checks(on_nonfinite="restore")`).

Model, optimizer, strategies and scheduler are restored. Data, random numbers and the number of steps are not: the same
samples would give the same gradients.
"""

from __future__ import annotations

from pathlib import Path

from fleetx.base.user_line import warn
from fleetx.engine.checkpoint import random_states
from fleetx.engine.checkpoint.read import read
from fleetx.engine.checkpoint.snapshot import Extras
from fleetx.engine.engine import Engine
from fleetx.errors import NumbersError


class Back:
    def __init__(self, engine: Engine, extras: Extras):
        self._engine, self._extras = engine, extras
        self._to: Path | None = None  # the checkpoint that was restored last
        self._updated = False  # was an update applied since then?
        self.reason = ""
        self.wanted = False  # by this rank; if ranks update on their own, the others may not know yet
        self.now = False  # all ranks know
        engine.restore = self._ask

    def _ask(self, reason: str) -> None:
        self.reason, self.wanted, self.now = reason, True, self._engine.updates_together

    def stepped(self) -> None:
        self._updated = self._updated or self._engine.updated

    def read(self, folder: Path) -> None:
        random = random_states.states(self._engine.device)
        read(self._engine, folder, Extras(scheduler=self._extras.scheduler, whole=False))
        random_states.restore(random, self._engine.device)

    def done(self, to: Path | None) -> None:
        reason = self.reason or "a gradient on another rank was not finite"
        if to is None:
            raise NumbersError(f"{reason}, and there is no checkpoint to restore yet: save one earlier")
        if self._to is not None and (to == self._to or not self._updated):
            raise NumbersError(
                f"{reason}. {self._to.name} was restored, but training fails again from there: lower the learning "
                "rate, look at the data, or remove that checkpoint to resume from an older one"
            )
        if self._engine.world.rank == 0:
            warn(f"{reason}: {to.name} is restored, and training continues with the next samples")
        self._to, self._updated = to, False
        self.reason, self.wanted, self.now = "", False, False

    def close(self) -> None:
        self._engine.restore = None
