"""A short run that branches off a checkpoint, for `fleetx batch`: takes the place of `fleet.checkpoints`.

It loads the newest checkpoint but saves none, records the loss of each step, and ends the script after a given number
of steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from fleetx.base.branch_order import Order
from fleetx.base.files import write_atomic
from fleetx.comm import peers
from fleetx.engine.checkpoint.folders import latest
from fleetx.engine.checkpoint.read import read
from fleetx.engine.checkpoint.snapshot import Extras
from fleetx.engine.engine import Engine
from fleetx.errors import UsageError


class Branch:
    """Implements what a loop uses of `Checkpoints`."""

    restored = None

    def __init__(self, engine: Engine, root: Path, extras: Extras, order: Order):
        self._engine, self._extras, self._order = engine, extras, order
        self._losses: list[Tensor] = []
        peers.meet("fleet.checkpoints")
        self.resumed = latest(root, engine.world)
        if self.resumed is not None:
            read(engine, self.resumed, extras)
        engine.rates.factor = order.rate
        engine.counts_feed = True

    @property
    def step(self) -> int:
        return self._extras.step

    def __enter__(self) -> Branch:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __iter__(self) -> Iterator[int]:
        while True:
            yield self.step
            self.stepped()

    def stepped(self) -> None:
        loss = self._engine.step.loss
        if loss is None:
            raise UsageError(
                "fleetx batch needs the loss, which cannot be seen from inside loss.backward(): call "
                "fleet.backward(loss) or fleet.forward_backward instead, or have the model return its loss"
            )
        self._losses.append(loss.detach().double().mean())
        self._extras.step += 1
        if len(self._losses) == self._order.steps:
            self._finish()

    def save(self, *, sync: bool = False) -> None:
        """No-op: a branch leaves no checkpoint."""

    def close(self) -> None: ...

    def _finish(self) -> None:
        engine = self._engine
        losses = torch.stack(self._losses).to(engine.world.device)
        group = engine.layout.replica_group
        if group.size > 1:
            group.sum(losses)
        found = {
            "losses": (losses / group.size).tolist(),
            "feed": engine.feed,
            "replicas": group.size,
            "merged": engine.window(),
            "lr": float(engine.optimizer.param_groups[0]["lr"]),
            "resumed": None if self.resumed is None else self.resumed.name,
        }
        if engine.world.rank == 0:
            write_atomic(self._order.output, json.dumps(found))
        engine.saved_at = engine.clock  # nothing is lost if it ends inside a merge window
        raise SystemExit(0)
