"""Can this plan be applied to this model and optimizer? Checked before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fleetx.base.module_names import plain_name
from fleetx.comm.world import World
from fleetx.errors import StrategyError, UsageError
from fleetx.strategy.compose import Plan
from fleetx.strategy.stage import Stage

Names = Mapping[nn.Parameter, str]


def check(plan: Plan, model: nn.Module, optimizer: Optimizer, world: World) -> None:
    """Raise one error that lists everything that is wrong."""
    names = {p: plain_name(n) for n, p in model.named_parameters()}
    problems = [p for part in plan.parts for p in part.incompatibilities(model, optimizer, world)]
    problems += _model(plan, model)
    problems += _optimizer(plan, optimizer, names)
    if problems:
        raise StrategyError(problems)


def check_not_wrapped(model: nn.Module, reducer: Any) -> None:
    """DistributedDataParallel around a distributed model would divide the gradient by the world size again."""
    active: Any = DistributedDataParallel._active_ddp_module
    if active is not None and active.module is model and active is not getattr(reducer, "ddp", None):
        raise UsageError(
            "the distributed model is wrapped in DistributedDataParallel, which would average its gradients a second "
            "time: remove the wrapper (in a Trainer or in Fabric, turn its own data parallelism off)"
        )


def _model(plan: Plan, model: nn.Module) -> Iterator[str]:
    if isinstance(model, DistributedDataParallel | nn.DataParallel):
        yield f"the model is wrapped in {type(model).__name__}, which fleetx replaces: pass the plain model"


def _optimizer(plan: Plan, optimizer: Optimizer, names: Names) -> Iterator[str]:
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
    if loose and (plan.at(Stage.LOSS) or plan.at(Stage.GATE)):
        yield (
            f"{len(loose)} trainable parameters are not in the optimizer ({', '.join(loose[:3])}): their gradients "
            "would stay scaled or summed. Add them to the optimizer, or set requires_grad=False"
        )
