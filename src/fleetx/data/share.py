"""Whose share of the data is read here?"""

from __future__ import annotations

import gc
import sys

import torch.distributed as dist

from fleetx.errors import UsageError
from fleetx.roles import from_environment


def current() -> tuple[int, int]:
    """Which of how many replicas of the model this process feeds, as far as it is known by now.

    Workers that hold one replica together (the stages of a pipeline) take the same batches. Before a model is
    distributed every worker counts for itself, and before `fleet.init` the launcher's environment says who it is.
    """
    fleet = sys.modules.get("fleetx.fleet")
    if fleet is not None and fleet._engines:
        axes = _axes(fleet)
        if len(axes) > 1:
            gc.collect()  # models of the past, which only a cycle keeps alive
            axes = _axes(fleet)
        if len(axes) > 1:
            raise UsageError(
                "several models are distributed over different numbers of replicas: make the loader with "
                "replica=(fleet.replica_index(model), fleet.replica_num(model))"
            )
        if axes:
            return axes.pop()
    if fleet is not None and fleet._world is not None:
        return fleet._world.rank, fleet._world.size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    place = from_environment()
    return place.rank, place.size


def _axes(fleet: object) -> set[tuple[int, int]]:
    engines = list(fleet._engines)  # type: ignore[attr-defined]
    return {(engine.holding.axis.rank, engine.holding.axis.size) for engine in engines}
