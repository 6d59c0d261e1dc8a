"""paddle.fluid.incubate.fleet.collective: Fleet 1.x, with the fleet of Paddle 2."""

from __future__ import annotations

from fleetx.paddle.api import fleet
from fleetx.paddle.api.fleet import distributed_optimizer as CollectiveOptimizer
from fleetx.paddle.not_covered import not_covered
from fleetx.paddle.static.strategy import PaddleStrategy as DistributedStrategy

__all__ = ["CollectiveOptimizer", "DistributedStrategy", "fleet"]

__getattr__ = not_covered(__name__)
