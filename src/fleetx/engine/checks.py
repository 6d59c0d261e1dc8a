"""Can this plan be applied to this model and optimizer? Checked before anything is changed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fleetx.base import seams
from fleetx.base.module_names import plain_name
from fleetx.comm.world import World
from fleetx.engine.dtensors import local
from fleetx.errors import StrategyError
from fleetx.strategy.compose import Plan
from fleetx.strategy.part import switch_of
from fleetx.strategy.stage import Fact, Stage

ParameterNames = Mapping[nn.Parameter, str]
# A strategy that makes one of these also changes the parameters, or which of them the optimizer has.
_APART = {Fact.LOCAL, Fact.RESIDUAL, Fact.PARTED, Fact.STAGED}


def check(plan: Plan, model: nn.Module, optimizer: Optimizer, world: World) -> None:
    """Raise one error that lists everything that is wrong."""
    if lazy := [n for n, t in (*model.named_parameters(), *model.named_buffers()) if is_lazy(t)]:
        raise StrategyError(
            f"{', '.join(lazy[:3])} {'has' if len(lazy) == 1 else 'have'} no shape yet (a lazy module): call the model "
            "once on a batch before fleet.distribute, and build the optimizer after that"
        )
    names = {p: plain_name(n) for n, p in model.named_parameters()}
    problems = [p for part in plan.parts for p in part.incompatibilities(model, optimizer, world)]
    problems += _model(model)
    problems += _optimizer(plan, optimizer, names)
    problems += _replicas(plan, world)
    if problems:
        raise StrategyError(problems)


def _model(model: nn.Module) -> Iterator[str]:
    for module in model.modules():  # Fabric's setup() puts one below the top
        if name := _manager(module):
            how = f"is wrapped in {name}" if module is model else f"contains {name}"
            yield f"the model {how}, which fleetx replaces: pass the plain model"
            return
    if divided := next((n for n, p in model.named_parameters() if local(p) is not p), None):
        yield (
            f"parameter {plain_name(divided)!r} is a DTensor, as fully_shard makes them: pass the plain model, and set "
            "strategy.sharding = True to divide it"
        )


def _replicas(plan: Plan, world: World) -> Iterator[str]:
    """What acts between replicas needs several ranks that hold the same shards."""
    for part in plan.parts:
        if 1 < part.shards(world) == world.size:
            for switch in plan.between_replicas:
                divides = switch_of(type(part))
                yield (
                    f"`{switch}` acts between replicas of the model, but `{divides}` divides the only one between all "
                    f"{world.size} ranks: {part.for_replicas}, or {part.instead.get(switch, 'turn one of them off')}"
                )


def _manager(module: nn.Module) -> str:
    """The name of what else reduces or divides the parameters of this module, or ""."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kinds = [DistributedDataParallel, nn.DataParallel, *([fsdp.FullyShardedDataParallel] if fsdp is not None else [])]
    if any(isinstance(module, kind) for kind in kinds):
        return type(module).__name__
    # If torch's module was not imported, nothing was applied; importing it takes a while.
    applied = seams.applied_to(module) if seams.COMPOSABLE in sys.modules else None
    return "replicate()" if applied and "replicate" in applied else ""


def _optimizer(plan: Plan, optimizer: Optimizer, names: ParameterNames) -> Iterator[str]:
    if seams.STEP_HOOKS not in vars(optimizer):  # as accelerate's prepare() returns it
        yield f"{type(optimizer).__name__} wraps another optimizer and runs no hooks of its own: pass the wrapped one"
    apart = any(map(plan.makes, _APART))
    if apart and any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        yield (
            "ZeroRedundancyOptimizer updates only a share of the parameters on each rank and sends them to the others, "
            "but this strategy has the ranks hold or update their own: pass the optimizer that it wraps"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        yield "LBFGS changes parameters that have no gradient, so its update cannot be skipped: use another optimizer"
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if strangers := [p for p in held if p not in names]:
        shapes = ", ".join(str(tuple(p.shape)) for p in strangers[:3])
        yield (
            f"the optimizer has {len(strangers)} parameters that are not in the model (shapes {shapes}): they would "
            "be neither reduced nor unscaled. Put them and the model into one nn.Module"
        )
    mine = set(held)
    loose = [n for p, n in names.items() if p.requires_grad and p not in mine]
    acts = plan.at(Stage.LOSS) or plan.at(Stage.GATE) or plan.at(Stage.GRADIENT)
    if loose and (acts or apart):
        yield (
            f"{len(loose)} trainable parameters are not in the optimizer ({', '.join(loose[:3])}), so the strategy "
            "would leave them out or leave their gradients unfinished: add them to the optimizer (a second optimizer "
            "works only with plain data parallelism), or set requires_grad=False"
        )
