"""`auto`, `batch` and `fleetx batch` in the facade: how they change a strategy when a model is distributed."""

from __future__ import annotations

import copy
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base.branch_order import ordered
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


def checked(strategy: Any) -> DistributedStrategy:
    if not isinstance(strategy, DistributedStrategy):
        raise TypeError(f"strategy must be a fleet.DistributedStrategy, not {type(strategy).__name__}")
    return strategy


def planned(
    model: nn.Module,
    optimizer: Optimizer,
    strategy: DistributedStrategy,
    world: World,
    sample: Any,
    loss_fn: Callable[..., Tensor] | None,
) -> BatchPlan | None:
    """The split of the batch that auto chooses or the strategy declares, with its strategy; None with neither."""
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
    """A different number of replicas or merged steps would silently change the number of samples per update."""
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
            f"batch_configs['replicas'] = {declared['replicas']}, but this run has {replicas}: start "
            "as many ranks as when the strategy was made, remove batch from it, or search again with strategy.auto"
        )
    if problems:
        raise StrategyError(problems)


def watch_feed(engine: Engine, plan: BatchPlan) -> None:
    """Check that batches have the planned size, because any other size would change the global batch.

    The first batch must have it; later ones may be smaller, as at the end of the data.
    """
    session.current().entries[engine].batch_plan = plan
    started = False

    def check(samples: int) -> None:
        nonlocal started
        if samples and (samples > plan.feed or (samples < plan.feed and not started)):
            raise UsageError(
                f"a batch of {samples} samples, but the plan is {plan.feed} per step: create the loader with "
                f"batch_size=fleet.batch().feed ({plan.total} samples per update = {plan.feed} x {plan.merged} "
                f"merged x {plan.replicas} replicas)"
            )
        started = True

    engine.counts_feed, engine.check_feed = True, check


def branched(strategy: DistributedStrategy) -> DistributedStrategy:
    """The strategy of a short run of `fleetx batch`, which merges more steps than the script says."""
    order = ordered()
    if order is None:
        return strategy
    if strategy.auto:
        raise UsageError("fleetx batch changes gradient_merge, which `auto` chooses: load the strategy that auto wrote")
    made = copy.deepcopy(strategy)
    merge = dict(made.gradient_merge_configs) if made.gradient_merge else {}
    if not merge.get("avg", True):
        raise UsageError("fleetx batch needs the mean over merged steps: remove gradient_merge_configs['avg'] = False")
    made.gradient_merge = {"k_steps": merge.get("k_steps", 1) * order.merge}
    made.batch = False
    return made
