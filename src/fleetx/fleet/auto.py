"""Where `auto` and `fleetx plan` meet the facade."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.comm.world import World
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
