"""`fleet.release`: remove everything from a model and an optimizer again."""

from __future__ import annotations

import gc
import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base import seams
from fleetx.base.wrapping import unwrap
from fleetx.engine.dtensors import local
from fleetx.engine.run import Step
from fleetx.errors import UsageError
from fleetx.optim.adopt import become
from fleetx.strategy.stage import Stage

if TYPE_CHECKING:
    from fleetx.engine.engine import Engine

_MISSING = object()


def release(engine: Engine) -> tuple[nn.Module, Optimizer]:
    """Undo what the engine set up. Every rank must call it."""
    merges = bool(engine.plan.at(Stage.GATE))
    engine.check_stepped("it and fleet.flush() before fleet.release()" if merges else "it before fleet.release()")
    if engine.merged:
        steps = (
            "1 step of a merge window has" if engine.merged == 1 else f"{engine.merged} steps of a merge window have"
        )
        raise UsageError(f"{steps} not been applied: call fleet.flush() before fleet.release()")
    engine.step = Step()  # the gradients of the last backward were discarded
    engine.drain(last=True)
    if not engine.updates_together:
        _average_optimizer(engine)
    engine.released = True
    take_off(engine)
    engine.gradients.detach()
    engine.notes, engine.in_progress, engine.saved_at = {}, {}, engine.clock
    gc.collect()  # the reducer holds its process group until it is collected
    engine.world.destroy_groups()
    forget_compiled()
    return engine.model, engine.optimizer


@torch.no_grad()
def _average_optimizer(engine: Engine) -> None:
    """Ranks that updated on their own have different momenta, and would drift apart under any other strategy.

    `drain` has averaged the parameters. As in a load, the mean is over the ranks that have a state.
    """
    world = engine.layout.replicas
    states = {name: (p, engine.optimizer.state.get(p, {})) for p, name in engine.names.items()}
    mine = [
        [name, key, list(local(value).shape), str(value.dtype).removeprefix("torch."), number]
        for name, (_, state) in states.items()
        for key, (value, number) in ((key, _as_tensor(each)) for key, each in state.items())
        if value is not None
    ]
    holders = Counter(json.dumps(entry) for found in world.gather_json(mine) for entry in found)
    for entry, count in holders.items():
        name, key, shape, dtype, number = json.loads(entry)
        p, state = states[name]
        own = _as_tensor(state[key])[0] if key in state else None
        if own is None:
            like, kind = list(local(p).shape) == shape, getattr(torch, dtype)
            own = torch.zeros_like(p, dtype=kind) if like else torch.zeros(shape, dtype=kind)
        mean = local(own).to(world.device)
        world.sum(mean)
        local(own).copy_(mean / count)
        engine.optimizer.state[p][key] = own.item() if number else own


def _as_tensor(value: Any) -> tuple[Tensor | None, bool]:
    """A state that can be averaged, and whether it is a Python number."""
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64), True
    fits = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
    return (value if fits else None), False


def take_off(engine: Engine) -> None:
    """Remove hooks, threads and wrappers, and call what the parts passed to `on_release`."""
    for handle in engine.handles:
        handle.remove()
    engine.close()
    for undo in reversed(engine.undo):
        undo()
    unwrap({*engine.modules, *engine.model.modules()})
    engine.handles, engine.undo = [], []


def forget_compiled() -> None:
    """torch.compile does not guard on hooks: code that it compiled earlier for this class would not run them."""
    if seams.DYNAMO in sys.modules:
        sys.modules[seams.DYNAMO].reset()


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
        """Call when the strategy has made its changes: `restore` keeps what the user changes later."""
        self._changes = [
            {k: old.get(k, _MISSING) for k in {*old, *new} if old.get(k, _MISSING) is not new.get(k, _MISSING)}
            for old, new in zip(self._before, self._options(), strict=True)
        ]
        self._before = []

    def restore(self) -> None:
        optimizer = self._optimizer
        tracked = hasattr(vars(optimizer).get("step"), seams.TRACKED)
        if type(optimizer) is not self._kind and tracked:
            become(optimizer, self._kind)  # a scheduler has wrapped the strategy's step()
        optimizer.__class__ = self._kind
        places = [vars(optimizer), optimizer.defaults, *optimizer.param_groups]
        for place, changes in zip(places, self._changes, strict=False):
            _change(place, changes)
        known = self._changes[2:]
        default = {key: optimizer.defaults.get(key, _MISSING) for changes in known for key in changes}
        for group in optimizer.param_groups[len(known) :]:  # added since
            _change(group, default)


def _change(place: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if value is _MISSING:
            place.pop(key, None)
        else:
            place[key] = value
