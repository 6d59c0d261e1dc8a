"""paddle.distributed: fleet, and who this worker is."""

from __future__ import annotations

from fleetx.static.covered import not_covered
from fleetx.static.paddle import fleet
from fleetx.static.paddle.fleet import worker_index as get_rank
from fleetx.static.paddle.fleet import worker_num as get_world_size

__all__ = ["fleet", "get_rank", "get_world_size"]

__getattr__ = not_covered(__name__)
