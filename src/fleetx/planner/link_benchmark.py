"""How fast ranks talk to each other, and how much a device streams: measured, at a few sizes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

import torch
import torch.distributed as dist

from fleetx.comm.world import World
from fleetx.strategy.cost_model import Link

SIZES = (1 << 14, 1 << 18, 1 << 21, 1 << 23)  # bytes
ENOUGH = 0.1  # seconds for one size: then larger ones are not tried
_HERE = Link(0.0, 1e12)  # between a rank and itself


def reduced(world: World, dtype: torch.dtype = torch.float32) -> Link:
    """An all-reduce of a flat tensor between all ranks."""
    if world.size == 1:
        return _HERE

    def tensor(size: int) -> torch.Tensor:
        return torch.zeros(size // dtype.itemsize, dtype=dtype, device=world.device)

    found = _link(world, lambda size: world.sum(tensor(size)))
    size = max(min(int(ENOUGH * found.speed), SIZES[-1]), SIZES[0])
    return replace(found, busy=_stolen(world, tensor(size), found.seconds(size)))


def _stolen(world: World, tensor: torch.Tensor, seconds: float) -> float:
    """How much longer, for each byte, arithmetic takes that runs while the tensor is reduced."""
    a = torch.ones(512, 512, device=world.device)

    def compute(times: int) -> float:
        world.barrier()
        begun = _now(world)
        for _ in range(times):
            a @ a
        return _now(world) - begun

    compute(2)
    once = _worst(world, compute(10)) / 10
    times = int(min(3 * seconds / once, 5000)) + 10  # long enough to hide it, whatever the load makes of it
    alone, beside = [], []
    for _ in range(2):
        alone.append(_worst(world, compute(times)))
        world.barrier()
        begun = _now(world)
        work = dist.all_reduce(tensor, async_op=True)
        for _ in range(times):
            a @ a
        computed = _now(world) - begun
        assert work is not None
        work.wait()
        beside.append(_worst(world, computed))
    return max(min(beside) - min(alone), 0.0) / tensor.nbytes


def gathered(world: World) -> Link:
    """All ranks get the whole of a tensor of which each has a part."""
    if world.size == 1:
        return _HERE

    def gather(size: int) -> None:
        dist.all_gather_single(_some(size, world), _some(size // world.size, world))

    return _link(world, gather)


def scattered(world: World) -> Link:
    """All ranks have a tensor, and each gets a part of their sum."""
    if world.size == 1:
        return _HERE

    def scatter(size: int) -> None:
        dist.reduce_scatter_single(_some(size // world.size, world), _some(size, world))

    return _link(world, scatter)


def _some(size: int, world: World) -> torch.Tensor:
    each = max(size // 4 // world.size, 1) * world.size  # every rank has as much as the next
    return torch.zeros(each if size >= 4 * world.size else 1, device=world.device)


def between(world: World, first: int, second: int) -> Link:
    """From one rank to another; every rank must call it. The time is that of a message, one way."""

    def send(size: int) -> None:
        if world.rank in (first, second):
            tensor = torch.zeros(size // 4, device=world.device)
            steps = (dist.send, dist.recv) if world.rank == first else (dist.recv, dist.send)
            for step in steps:
                step(tensor, second if world.rank == first else first)

    found = _link(world, send)
    return Link(found.latency / 2, found.speed * 2)


def tiers(world: World, hosts: Sequence[int]) -> tuple[Link, Link]:
    """Inside of a host, and between hosts; one stands for the other where there is no such pair."""
    pairs = [(a, b) for a in range(world.size) for b in range(a + 1, world.size)]
    near = next((pair for pair in pairs if hosts[pair[0]] == hosts[pair[1]]), None)
    far = next((pair for pair in pairs if hosts[pair[0]] != hosts[pair[1]]), None)
    found = [between(world, *pair) if pair is not None else None for pair in (near, far)]
    inner, outer = found[0] or found[1] or _HERE, found[1] or found[0] or _HERE
    return inner, outer


def stream(world: World) -> float:
    """Bytes a second, when all ranks add at once."""
    a, b = torch.zeros(1 << 24, device=world.device), torch.ones(1 << 24, device=world.device)  # no cache holds them
    times = []
    for _ in range(6):
        world.barrier()
        begun = _now(world)
        a.add_(b)
        times.append(_now(world) - begun)
    return 3 * a.nbytes / _worst(world, sorted(times)[len(times) // 2])


def _link(world: World, call: Callable[[int], None]) -> Link:
    """A line through the times of a few sizes; the slowest rank counts."""
    points: list[tuple[int, float]] = []
    for size in SIZES:
        call(size)
        times: list[float] = []
        for _ in range(3):
            world.barrier()
            begun = _now(world)
            call(size)
            times.append(_now(world) - begun)
        points.append((size, _worst(world, min(times))))
        if points[-1][1] > ENOUGH:
            break
    (small, first), (large, last) = points[0], points[-1]
    if large == small:
        return Link(0.0, large / last)
    speed = (large - small) / max(last - first, 1e-9)
    return Link(max(first - small / speed, 1e-6), speed)


def _worst(world: World, value: float) -> float:
    found = torch.tensor([value], dtype=torch.float64, device=world.device)
    world.maximum(found)
    return found.item()


def _now(world: World) -> float:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return time.perf_counter()


def memory() -> int:
    """Bytes that this machine, or the cgroup of this process, has in all."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        with open("/proc/self/cgroup") as file:
            mine = next((line.strip().split("::")[1] for line in file if line.startswith("0::")), "/")
    except OSError:
        mine = "/"
    names = [f"/sys/fs/cgroup{above if above != '/' else ''}/memory.max" for above in _upwards(mine)]
    for name in (*names, "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(name) as file:
                limits.append(int(file.read()))
        except (OSError, ValueError):  # it is not there, or says "max"
            continue
    return min(limits)


def _upwards(path: str) -> list[str]:
    """A folder and all above it: each may have a limit."""
    return [path, *(str(above) for above in PurePosixPath(path).parents)]
