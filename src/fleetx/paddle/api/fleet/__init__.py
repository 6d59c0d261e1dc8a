"""paddle.distributed.fleet and paddle.fleet: fleetx.fleet, with a distributed_optimizer for Paddle's optimizers too."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from fleetx import fleet
from fleetx.fleet import DistributedStrategy, worker_index, worker_num
from fleetx.paddle.not_covered import not_covered
from fleetx.paddle.static.optimizers import DistributedOptimizer, PaddleOptimizer

__all__ = ["DistributedStrategy", "distributed_optimizer", "worker_index", "worker_num"]
__all__ += [name for name in fleet.__all__ if name not in __all__]


def distributed_optimizer(
    optimizer: PaddleOptimizer | Optimizer, strategy: DistributedStrategy | None = None
) -> DistributedOptimizer | Optimizer:
    """Return an optimizer whose `minimize(model.loss)` trains on all workers; torch's optimizers go to fleetx.fleet."""
    if isinstance(optimizer, PaddleOptimizer):
        fleet.worker_index()  # raises an error before fleet.init, as in Paddle
        return DistributedOptimizer(optimizer, strategy)
    return fleet.distributed_optimizer(optimizer, strategy)


_not_covered = not_covered(__name__)


def __getattr__(name: str) -> Any:
    return getattr(fleet, name) if name in fleet.__all__ else _not_covered(name)
