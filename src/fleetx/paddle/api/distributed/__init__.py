"""paddle.distributed: fleet, the rank of this worker and the number of workers."""

from __future__ import annotations

from fleetx.paddle.api import fleet
from fleetx.paddle.api.fleet import worker_index as get_rank
from fleetx.paddle.api.fleet import worker_num as get_world_size
from fleetx.paddle.not_covered import not_covered

__all__ = ["fleet", "get_rank", "get_world_size"]

__getattr__ = not_covered(__name__)
