"""How fast ranks communicate and how fast a device streams memory, measured at a few sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fleetx.comm.world import World
from fleetx.measure.block_profile import now
from fleetx.strategy.cost_model import Link

SIZES = (1 << 14, 1 << 18, 1 << 21, 1 << 23)  # bytes
LONG = 0.1  # seconds: once a size takes this long, larger ones are skipped
_LOCAL = Link(0.0, 1e12)  # from a rank to itself


def all_reduce(world: World, dtype: torch.dtype = torch.float32) -> Link:
    def tensor(size: int) -> Tensor:
        return torch.zeros(size // dtype.itemsize, dtype=dtype, device=world.device)

    link = _measure(world, lambda size: world.sum(tensor(size)))
    if world.size == 1:
        return link
    size = max(min(int(LONG * link.speed), SIZES[-1]), SIZES[0])
    return replace(link, busy=_slowdown(world, tensor(size), link.seconds(size)))


def _slowdown(world: World, tensor: Tensor, seconds: float) -> float:
    """How much longer, per byte, compute takes while the tensor is being reduced."""
    a = torch.ones(512, 512, device=world.device)

    def compute(times: int, *, reduce: bool = False) -> float:
        world.barrier()
        start = now(world.device)
        work = dist.all_reduce(tensor, async_op=True) if reduce else None
        for _ in range(times):
            a @ a
        end = now(world.device)
        if work is not None:
            work.wait()
        return world.largest(end - start)

    compute(2)
    times = int(min(3 * seconds / (compute(10) / 10), 5000)) + 10  # to outlast the reduction even on a busy machine
    alone, together = zip(*[(compute(times), compute(times, reduce=True)) for _ in range(2)], strict=True)
    return max(min(together) - min(alone), 0.0) / tensor.nbytes


def all_gather(world: World) -> Link:
    return _measure(world, lambda size: dist.all_gather_single(_full(size, world), _shard(size, world)))


def reduce_scatter(world: World) -> Link:
    return _measure(world, lambda size: dist.reduce_scatter_single(_shard(size, world), _full(size, world)))


def _shard(size: int, world: World) -> Tensor:
    return torch.zeros(max(size // 4 // world.size, 1), device=world.device)


def _full(size: int, world: World) -> Tensor:
    return torch.zeros(max(size // 4 // world.size, 1) * world.size, device=world.device)


def inner_and_outer(world: World, hosts: Sequence[int]) -> tuple[Link, Link]:
    """Point-to-point links within a host and between hosts; one stands in for the other if it has no pair of ranks."""
    pairs = list(itertools.combinations(range(world.size), 2))
    near = next((pair for pair in pairs if hosts[pair[0]] == hosts[pair[1]]), None)
    far = next((pair for pair in pairs if hosts[pair[0]] != hosts[pair[1]]), None)
    inner, outer = (_point_to_point(world, *pair) if pair is not None else None for pair in (near, far))
    return inner or outer or _LOCAL, outer or inner or _LOCAL


def _point_to_point(world: World, first: int, second: int) -> Link:
    """The link in one direction. Every rank must call this."""

    def exchange(size: int) -> None:
        if world.rank in (first, second):
            tensor = torch.zeros(size // 4, device=world.device)
            steps = (dist.send, dist.recv) if world.rank == first else (dist.recv, dist.send)
            for step in steps:
                step(tensor, second if world.rank == first else first)

    link = _measure(world, exchange)
    return Link(link.latency / 2, link.speed * 2)


def bandwidth(world: World) -> float:
    """Bytes per second that elementwise operations read and write while all ranks do so at once."""
    a, b = torch.zeros(1 << 24, device=world.device), torch.ones(1 << 24, device=world.device)  # larger than any cache
    times = [_timed(world, lambda: a.add_(b)) for _ in range(6)]
    return 3 * a.nbytes / world.largest(sorted(times)[len(times) // 2])


def _timed(world: World, call: Callable[[], Any]) -> float:
    """Seconds on this rank when all ranks start together."""
    world.barrier()
    start = now(world.device)
    call()
    return now(world.device) - start


def _measure(world: World, call: Callable[[int], Any]) -> Link:
    """Fit a line to the times of the slowest rank at a few sizes."""
    if world.size == 1:
        return _LOCAL
    points: list[tuple[int, float]] = []
    for size in SIZES:
        call(size)
        times = [_timed(world, partial(call, size)) for _ in range(3)]
        points.append((size, world.largest(min(times))))
        if points[-1][1] > LONG:
            break
    (small, first), (large, last) = points[0], points[-1]
    if large == small:
        return Link(0.0, large / last)
    speed = (large - small) / max(last - first, 1e-9)
    return Link(max(first - small / speed, 1e-6), speed)
