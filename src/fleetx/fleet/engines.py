"""The engines that there are: which model belongs to which, what was declared for it, and what `auto` chose."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from fleetx.base.trees import samples_in
from fleetx.base.wrapping import Layer, wrap
from fleetx.engine.engine import Engine
from fleetx.errors import UsageError
from fleetx.strategy import DistributedStrategy

if TYPE_CHECKING:
    from fleetx.planner import Chosen

engines: weakref.WeakKeyDictionary[Engine, DistributedStrategy] = weakref.WeakKeyDictionary()
chosen: weakref.WeakKeyDictionary[Engine, Chosen] = weakref.WeakKeyDictionary()
feeds: weakref.WeakKeyDictionary[Engine, Feed] = weakref.WeakKeyDictionary()  # of pipelines


def find(which: nn.Module | Optimizer | None, *, half: bool) -> Engine:
    """The engine of a model or an optimizer; of None the only one. half: was only one of Paddle's two calls made?"""
    if which is not None:
        for engine in engines:
            if which is engine.model or which is engine.optimizer:
                return engine
        raise UsageError("this model or optimizer was not given to fleet.distribute")
    if len(engines) > 1:
        gc.collect()  # models of the past, which only a cycle keeps alive
    if not engines:
        waiting = " (distributed_model and distributed_optimizer must both be called)" if half else ""
        raise UsageError(f"call fleet.distribute(model, optimizer, strategy) first{waiting}")
    if len(engines) > 1:
        raise UsageError(f"{len(engines)} models are distributed: say which with model=... or optimizer=...")
    return next(iter(engines))


def refuse_twice(model: nn.Module, optimizer: Optimizer) -> None:
    for engine in engines:
        if engine.model is model or engine.optimizer is optimizer:
            raise UsageError("this model or optimizer is distributed already: make a new one to change its strategy")


def rounds() -> int:
    engine = Engine.stepped() if Engine.stepped is not None else None
    return engine.round if engine is not None else 0


def shares() -> set[tuple[int, int]]:
    """Which of how many replicas this worker feeds, for each of the models."""
    return {(engine.holding.axis.rank, engine.holding.axis.size) for engine in list(engines)}


def let_go() -> None:
    """Before the process group is left: a reducer that still holds it at the very end may abort the process."""
    for engine in list(engines):
        engine.let_go()
    gc.collect()


class Feed:
    """Watches that the batches are those that `auto` has planned with: others would change the global batch."""

    def __init__(self, plan: Chosen):
        self._plan, self._begun = plan, False

    def check(self, inputs: Any) -> None:
        """The first batch must be as large as planned; later ones may be smaller, at the end of the data."""
        found, feed = samples_in(inputs), self._plan.feed
        if found and (found > feed or (found < feed and not self._begun)):
            raise UsageError(
                f"auto has planned for {feed} samples at a time, and a batch of {found} came: make the loader with "
                f"batch_size=fleet.batch().feed ({self._plan.total} samples in an update = {feed} x "
                f"{self._plan.merged} merged x {self._plan.replicas} replicas)"
            )
        self._begun = True


def watch(engine: Engine, plan: Chosen) -> None:
    """Check each batch that goes into the model to train it."""
    feed = Feed(plan)
    chosen[engine] = plan

    def around(module: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if torch.is_grad_enabled() and module.training:
            feed.check((args, kwargs))
        return inner(*args, **kwargs)

    if type(engine) is Engine:
        wrap(engine.model, Layer.MATHEMATICS, around)
    else:  # a pipeline calls the model with pieces of the batch
        feeds[engine] = feed


def check_feed(engine: Engine, inputs: Any) -> None:
    if engine in feeds and torch.is_grad_enabled():
        feeds[engine].check(inputs)
