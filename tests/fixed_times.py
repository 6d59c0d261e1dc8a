"""Searches in which every measured time is a fixed number, so that no test depends on the clock. Bytes are counted."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from fleetx.measure.child import Answer
from fleetx.planner import profile
from fleetx.strategy.cost_model import Cluster, Link

LINK = Link(latency=1e-4, speed=1e9)


def cluster(world, *, memory, global_batch):
    return Cluster(
        world.size, world.size, LINK, LINK, LINK, LINK, LINK, bandwidth=1e10, memory=memory or 1 << 40,
        all_reduce_16bit={}, global_batch=global_batch,
    )  # fmt: skip


def timed(workload, parts, sizes, world, seconds):
    return Answer(value={"times": [(n, 1e-3 + 1e-4 * n, 2e-3 + 2e-4 * n) for n in sizes], "update": 1e-3})


def blocks(*args, count=profile._blocks):
    return tuple(replace(block, seconds=1e-3) for block in count(*args))


@contextmanager
def fixed_times():
    with patch.multiple(profile, measure_cluster=cluster, _timed=timed, _blocks=blocks):
        yield
