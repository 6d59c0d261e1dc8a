"""`auto` and `batch` in the facade: the search when a model is distributed, and the check of every batch."""

from __future__ import annotations

import copy
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base.trees import samples_in
from fleetx.base.wrapping import Layer, wrap
from fleetx.comm import session
from fleetx.comm.world import World
from fleetx.engine.engine import Engine
from fleetx.errors import StrategyError, UsageError
from fleetx.parts.auto import PLAN
from fleetx.strategy import DistributedStrategy


@dataclass(frozen=True)
class BatchPlan:
    """How the batch of an update is split: `merged` steps of `feed` samples on each of `replicas`."""

    feed: int
    merged: int
    replicas: int
    strategy: DistributedStrategy
    text: str = ""  # the explanation of auto
    path: str = ""  # where auto wrote the strategy

    @property
    def total(self) -> int:
        return self.feed * self.merged * self.replicas

    def __str__(self) -> str:
        equation = f"{self.total} = {self.feed} samples per step x {self.merged} merged x {self.replicas} replicas"
        return self.text or f"batch: {equation}"


def planned(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: DistributedStrategy,
    world: World,
    sample: Any,
    loss_fn: Callable[..., Tensor] | None,
) -> BatchPlan | None:
    """The strategy that auto chooses, or the one that declares a batch; None if there is neither."""
    text = path = ""
    settings = os.environ.get(PLAN)
    if settings is not None:
        strategy = _with_auto(strategy, settings)
    if strategy.auto:
        from fleetx import planner  # few scripts need it

        chosen = planner.choose(model, optimizer, strategy, world, sample=sample, loss_fn=loss_fn)
        strategy, text, path = chosen.strategy, chosen.text, chosen.path
        if world.rank == 0:
            print(text, flush=True)
        if settings is not None:
            world.barrier()
            sys.exit(0)
    if not strategy.batch:
        return None
    _check_world(strategy, model, world)
    return BatchPlan(**strategy.batch_configs, strategy=strategy, text=text, path=path)


def _with_auto(strategy: DistributedStrategy, text: str) -> DistributedStrategy:
    import yaml

    made = copy.deepcopy(strategy)
    made.auto, made.batch = True, False
    for key, value in yaml.safe_load(text).items():
        made.auto_configs[key] = value
    return made


def _check_world(strategy: DistributedStrategy, model: nn.Module, world: World) -> None:
    """Another number of replicas or merged steps would silently change the number of samples per update."""
    declared, problems = strategy.batch_configs, []
    merged = strategy.gradient_merge_configs["k_steps"] if strategy.gradient_merge else 1
    if declared["merged"] != merged:
        problems.append(
            f"batch_configs['merged'] = {declared['merged']}, but the strategy merges {merged} steps: set "
            "gradient_merge_configs['k_steps'] to the same number"
        )
    replicas = world.size // math.prod(part.span(model, world) for part in strategy.plan().parts)
    if declared["replicas"] != replicas:
        problems.append(
            f"batch_configs['replicas'] = {declared['replicas']}, but {world.size} ranks make {replicas}: start "
            "as many ranks as when the strategy was made, remove batch from it, or search again with strategy.auto"
        )
    if problems:
        raise StrategyError(problems)


class FeedCheck:
    """Checks that batches have the planned size, because others would change the global batch."""

    def __init__(self, plan: BatchPlan):
        self._plan, self._started = plan, False

    def check(self, inputs: Any) -> None:
        """The first batch must have the planned size; later ones may be smaller, as at the end of the data."""
        samples, feed = samples_in(inputs), self._plan.feed
        if samples and (samples > feed or (samples < feed and not self._started)):
            raise UsageError(
                f"a batch of {samples} samples, but the plan is {feed} per step: create the loader with "
                f"batch_size=fleet.batch().feed ({self._plan.total} samples per update = {feed} x {self._plan.merged} "
                f"merged x {self._plan.replicas} replicas)"
            )
        self._started = True


def watch_feed(engine: Engine, plan: BatchPlan) -> None:
    """Check each batch that enters the model in training."""
    entry = session.current().entries[engine]
    entry.batch_plan, feed = plan, FeedCheck(plan)

    def around(module: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if torch.is_grad_enabled() and module.training:
            feed.check((args, kwargs))
        return inner(*args, **kwargs)

    if type(engine) is Engine:
        wrap(engine.model, Layer.MATHEMATICS, around)
    else:  # a pipeline calls the model with micro-batches
        entry.feed_check = feed


def check_feed(engine: Engine, inputs: Any) -> None:
    feed = session.current().entries[engine].feed_check
    if feed is not None and torch.is_grad_enabled():
        feed.check(inputs)
