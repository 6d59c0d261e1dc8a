"""paddle.distributed.fleet and paddle.fleet: fleetx.fleet, whose distributed_optimizer takes described ones too."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from fleetx import fleet
from fleetx.applications.not_covered import not_covered
from fleetx.fleet import DistributedStrategy, worker_index, worker_num
from fleetx.paddle.static.optimizers import Described, Distributed

__all__ = ["DistributedStrategy", "distributed_optimizer", "worker_index", "worker_num"]
__all__ += [name for name in fleet.__all__ if name not in __all__]


def distributed_optimizer(
    optimizer: Described | Optimizer, strategy: DistributedStrategy | None = None
) -> Distributed | Optimizer:
    """For a static script: what `minimize(model.loss)` is called on. One of torch's is given to fleetx.fleet."""
    if isinstance(optimizer, Described):
        fleet.worker_index()  # fleet.init must have been called, as in Paddle
        return Distributed(optimizer, strategy)
    return fleet.distributed_optimizer(optimizer, strategy)


_refuse = not_covered(__name__)


def __getattr__(name: str) -> Any:
    return getattr(fleet, name) if name in fleet.__all__ else _refuse(name)
