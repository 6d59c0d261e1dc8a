"""paddle.fluid.incubate.fleet.collective: Fleet 1.x, with the fleet of Paddle 2."""

from fleetx.paddle.api import fleet
from fleetx.paddle.api.fleet import distributed_optimizer as CollectiveOptimizer
from fleetx.paddle.static.strategy import PaddleStrategy as DistributedStrategy

__all__ = ["CollectiveOptimizer", "DistributedStrategy", "fleet"]
