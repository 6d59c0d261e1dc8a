"""Where `auto` and `fleetx plan` meet the facade."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base.trees import samples_in
from fleetx.base.wrapping import Layer, wrap
from fleetx.comm import session
from fleetx.comm.world import World
from fleetx.engine.engine import Engine
from fleetx.errors import UsageError
from fleetx.parts.auto import ASKED
from fleetx.strategy import DistributedStrategy

if TYPE_CHECKING:
    from fleetx.planner import Chosen


def planned(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: DistributedStrategy,
    world: World,
    sample: Any,
    loss_fn: Callable[..., Tensor] | None,
) -> Chosen | None:
    """What auto chooses; None where nobody asks for it."""
    asked = os.environ.get(ASKED)
    if asked is not None:
        strategy = _with(strategy, asked)
    if not strategy.auto:
        return None
    from fleetx import planner  # of no use to whoever says what he wants

    found = planner.choose(model, optimizer, strategy, world, sample=sample, loss_fn=loss_fn)
    if world.rank == 0:
        print(found, flush=True)
    if asked is not None:
        world.barrier()
        sys.exit(0)
    return found


def _with(strategy: DistributedStrategy, text: str) -> DistributedStrategy:
    import yaml

    made = copy.deepcopy(strategy)
    made.auto = True
    for key, value in yaml.safe_load(text).items():
        made.auto_configs[key] = value
    return made


class FeedCheck:
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


def watch_feed(engine: Engine, plan: Chosen) -> None:
    """Check each batch that goes into the model to train it."""
    entry = session.current().entries[engine]
    entry.chosen, feed = plan, FeedCheck(plan)

    def around(module: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if torch.is_grad_enabled() and module.training:
            feed.check((args, kwargs))
        return inner(*args, **kwargs)

    if type(engine) is Engine:
        wrap(engine.model, Layer.MATHEMATICS, around)
    else:  # a pipeline calls the model with pieces of the batch
        entry.feed = feed


def check_feed(engine: Engine, inputs: Any) -> None:
    feed = session.current().entries[engine].feed
    if feed is not None and torch.is_grad_enabled():
        feed.check(inputs)
