"""Can this plan be applied to this model and optimizer? Checked before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from fleetx.base import seams
from fleetx.base.module_names import plain_name
from fleetx.comm.world import World
from fleetx.errors import StrategyError
from fleetx.strategy.compose import Plan
from fleetx.strategy.stage import Fact, Stage

Names = Mapping[nn.Parameter, str]
# Where these hold, a strategy also changes the parameters, or which of them the optimizer has.
_APART = {Fact.LOCAL, Fact.RESIDUAL, Fact.PARTED, Fact.STAGED}


def check(plan: Plan, model: nn.Module, optimizer: Optimizer, world: World) -> None:
    """Raise one error that lists everything that is wrong."""
    if lazy := list(_lazy(model)):
        raise StrategyError(lazy)
    names = {p: plain_name(n) for n, p in model.named_parameters()}
    problems = [p for part in plan.parts for p in part.incompatibilities(model, optimizer, world)]
    problems += _model(plan, model)
    problems += _optimizer(plan, optimizer, names)
    if problems:
        raise StrategyError(problems)


def _model(plan: Plan, model: nn.Module) -> Iterator[str]:
    if isinstance(model, DistributedDataParallel | nn.DataParallel):
        yield f"the model is wrapped in {type(model).__name__}, which fleetx replaces: pass the plain model"
    elif any(isinstance(m, DistributedDataParallel) for m in model.modules()):  # as after Fabric's setup()
        yield "the model contains DistributedDataParallel, which fleetx replaces: pass the plain model"


def _lazy(model: nn.Module) -> Iterator[str]:
    lazy = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if is_lazy(t)]
    if lazy:
        yield (
            f"{', '.join(lazy[:3])} {'has' if len(lazy) == 1 else 'have'} no shape yet (a lazy module): call the model "
            "once on a batch before fleet.distribute, and build the optimizer after that"
        )


def _optimizer(plan: Plan, optimizer: Optimizer, names: Names) -> Iterator[str]:
    if seams.STEP_HOOKS not in vars(optimizer):  # as accelerate's prepare() returns it
        yield f"{type(optimizer).__name__} wraps another optimizer and runs no hooks of its own: pass the wrapped one"
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
    if loose and (acts or any(act.claim.makes & _APART for act in plan.acts)):
        yield (
            f"{len(loose)} trainable parameters are not in the optimizer ({', '.join(loose[:3])}), so the strategy "
            "would leave them out or leave their gradients unfinished: add them to the optimizer (a second optimizer "
            "works only with plain data parallelism), or set requires_grad=False"
        )
