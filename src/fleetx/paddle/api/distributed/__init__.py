"""paddle.distributed: fleet, the rank of this worker and the number of workers."""

from fleetx.paddle.api import fleet
from fleetx.paddle.api.fleet import worker_index as get_rank
from fleetx.paddle.api.fleet import worker_num as get_world_size

__all__ = ["fleet", "get_rank", "get_world_size"]
