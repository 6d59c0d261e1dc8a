"""`fleet.release`: take everything off a model and an optimizer again."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from fleetx.base.wrapping import unwrap
from fleetx.errors import UsageError

if TYPE_CHECKING:
    from fleetx.engine.engine import Engine

_MISSING = object()


def release(engine: Engine) -> tuple[nn.Module, Optimizer]:
    """Undo what arming did. Every rank must call it."""
    if engine.merged or engine.step.tapped:
        raise UsageError(
            "a merge window or a backward is still open: call optimizer.step() and fleet.flush() before fleet.release"
        )
    engine.drain(last=True)
    for handle in engine.handles:
        handle.remove()
    engine.close()
    for undo in reversed(engine.undo):
        undo()
    unwrap(engine.model)
    engine.gradients.detach()
    engine.undo, engine.notes = [], {}
    gc.collect()  # the reducer holds its process group until it is collected
    engine.world.destroy_groups()
    forget_compiled()
    return engine.model, engine.optimizer


def forget_compiled() -> None:
    """torch.compile does not guard on hooks: what it compiled for this class before would not run them."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


class PlainOptimizer:
    """Remembers class, attributes and group options; `changed` notes which of them a strategy changed."""

    def __init__(self, optimizer: Optimizer):
        self._optimizer = optimizer
        self._kind = type(optimizer)
        self._before = self._options()

    def _options(self) -> list[dict[str, Any]]:
        """The attributes of the optimizer, its defaults, and each of its groups."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]
        return [dict(vars(self._optimizer)), dict(self._optimizer.defaults), *groups]

    def changed(self) -> None:
        """Call when the strategy has made its changes: what the user changes later stays."""
        self._changes = [
            {k: old.get(k, _MISSING) for k in {*old, *new} if old.get(k, _MISSING) is not new.get(k, _MISSING)}
            for old, new in zip(self._before, self._options(), strict=True)
        ]
        self._before = []

    def restore(self) -> None:
        self._optimizer.__class__ = self._kind
        places = [vars(self._optimizer), self._optimizer.defaults, *self._optimizer.param_groups]
        for place, changes in zip(places, self._changes, strict=False):  # groups may have been added since
            for key, value in changes.items():
                if value is _MISSING:
                    place.pop(key, None)
                else:
                    place[key] = value
