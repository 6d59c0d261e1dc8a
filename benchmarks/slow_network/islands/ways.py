"""The methods. Each tries CANDIDATES settings with one seed, is judged on held-out samples, and runs the best.

A setting is a multiple of the task's learning rate, and for those with an outer optimizer also its two numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch.distributed as dist

from benchmarks.slow_network import methods
from benchmarks.slow_network.islands import diloco
from benchmarks.slow_network.methods import Prepare, ours

ISLAND = 2  # ranks
PERIOD = 16
Settings = Mapping[str, float]
RATES: list[Settings] = [{"rate": rate} for rate in (0.5, 1.0, 2.0, 4.0)]
OUTER: list[Settings] = [
    {"rate": 1.0, "outer_lr": 1.0, "outer_momentum": 0.0},
    {"rate": 2.0, "outer_lr": 1.0, "outer_momentum": 0.0},
    {"rate": 1.0, "outer_lr": 0.7, "outer_momentum": 0.5},
    {"rate": 1.0, "outer_lr": 0.7, "outer_momentum": 0.9},  # those of DiLoCo
]
CANDIDATES = len(RATES)


@dataclass(frozen=True)
class Way:
    name: str
    title: str
    make: Callable[[Settings, str], Prepare]  # from settings and the name of the task
    candidates: list[Settings]
    period: int = 1
    background: bool = False
    slow: bool = False  # does a step take long on a slow link?
    whole: bool = False  # does what it sends change, so that only a whole training tells the time?
    alone: bool = False
    apart: bool = False  # only timed: islands that never exchange anything
    missing: Callable[[], str] = lambda: ""  # why it cannot run here


@cache
def island() -> dist.ProcessGroup:
    """The ranks of this host. Cached, because a group cannot be given back."""
    size, rank = dist.get_world_size(), dist.get_rank()
    groups = [dist.new_group([*range(first, first + ISLAND)]) for first in range(0, size, ISLAND)]
    return groups[rank // ISLAND]


def peer(name: str, title: str, prepare: Prepare, **more: Any) -> Way:
    return Way(name, title, lambda settings, task: prepare, RATES, **more)


def local(name: str, title: str, period: int = PERIOD, code: Mapping[str, Any] | None = None, **more: Any) -> Way:
    """`localsgd` between islands, with a code for what they exchange."""

    def make(settings: Settings, task: str) -> Prepare:
        outer = {key: settings[key] for key in ("outer_lr", "outer_momentum")}
        return ours(localsgd={"k_steps": period, "group_size": ISLAND, **outer, **more}, **(code or {}))

    return Way(name, title, make, OUTER, period, background=more.get("overlap", False))


def apart(settings: Settings, task: str) -> Prepare:
    return ours(localsgd={"k_steps": 1_000_000, "group_size": ISLAND})


def adaptive(settings: Settings, task: str) -> Prepare:
    outer = {key: settings[key] for key in ("outer_lr", "outer_momentum")}
    switch = {"init_k_steps": 2 * PERIOD, "max_k_steps": 4 * PERIOD, "group_size": ISLAND, **outer}
    return ours(adaptive_localsgd=switch, dgc=TENTH["dgc"])


TENTH = {"dgc": {"sparsity": [0.9], "value_dtype": "float16"}}
FOUR = {"quantized_allreduce": {"bits": 4}}

WAYS = [
    peer("ddp", "DDP, fp32", methods.ddp(), slow=True),
    peer("alone", "no communication", methods.alone, alone=True),
    Way("apart", "islands that never exchange", apart, OUTER, apart=True),
    local("island_dgc", "islands, k=32, dgc 0.9", 32, code=TENTH),
    local("island64_four", "islands, k=64, 4 bits", 64, code=FOUR),
    local("island", "islands, k=16"),
    peer("post_island", "torch's PostLocalSGD, islands, H=16", methods.post_local(PERIOD, island), period=PERIOD),
    Way("diloco", "torchft's DiLoCo, islands, H=16", diloco.make(PERIOD, island), OUTER, PERIOD,
        missing=diloco.missing),
    local("island_overlap", "islands, k=32, dgc 0.9, overlap", 32, code=TENTH, overlap=True),
    local("stream_four", "islands, k=64, 4 bits, 4 fragments, overlap", 64, code=FOUR, fragments=4, overlap=True),
    Way("adaptive", "islands, adaptive k from 32, dgc 0.9", adaptive, OUTER, 2 * PERIOD, whole=True),
    peer("power4", "torch's PowerSGD, rank 4", methods.power(4)),
]  # fmt: skip
BY_NAME = {way.name: way for way in WAYS}
OURS = [way.name for way in WAYS if way.name.startswith(("island", "stream", "adaptive"))]
