"""The end of a sharded download: every worker waits for the shards of all, because a list names files of each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from fleetx.comm.roles import from_environment
from fleetx.errors import DownloadError, UsageError


def with_all_workers(work: Callable[[], None]) -> None:
    """Call `work` on every worker and wait for the others. If it fails anywhere, every worker gets the error."""
    world = _world()
    if world is None:
        return work()
    error: BaseException | None = None
    try:
        work()
    except BaseException as failure:  # whatever it is: the others wait for this worker
        error = failure
    errors = world.gather_json("" if error is None else str(error) or type(error).__name__)
    if error is not None:
        raise error
    for rank, message in enumerate(errors):
        if message:
            raise DownloadError(f"the shard of worker {rank} failed: {message}")
    return None


def _world() -> Any:
    """The world of fleet.init; None if this worker is alone."""
    session = sys.modules.get("fleetx.comm.session")  # not imported here: downloading does not need torch
    world = session.current().world if session is not None else None
    if world is None and (size := from_environment().size) > 1:
        raise UsageError(
            f"shard_num: a sharded download waits for the shards of all {size} workers: call fleet.init() before it"
        )
    return world if world is not None and world.size > 1 else None
