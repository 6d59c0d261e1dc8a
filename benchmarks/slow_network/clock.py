"""Samples of one method at one rate."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.netlab import counters


@dataclass(frozen=True)
class Samples:
    """Of the slowest rank. `sent` is what the busiest host's interface counted, per step."""

    seconds: list[float]  # per step
    sent: float


def sampled(
    step: Callable[[], object], *, samples: int, period: int, lead: int, settle: Callable[[], object] | None = None
) -> Samples:
    """Time consecutive periods, after `lead` steps whose bytes are counted but which are not timed.

    settle: wait for transfers in the background. There must be none at the start, so that exactly the bytes of these
    steps are counted.
    """
    dist.barrier()
    before = counters.here()
    for _ in range(lead):
        step()
    if settle is None:
        dist.barrier()
    marks = [time.perf_counter()]
    for _ in range(samples):
        for _ in range(period):
            step()
        marks.append(time.perf_counter())
    if settle is not None:
        settle()
    dist.barrier()  # after the last bytes
    sent = (counters.here() - before).sent / (lead + samples * period)
    seconds = [(b - a) / period for a, b in itertools.pairwise(marks)]
    found = torch.tensor([*seconds, sent], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return Samples(found[:-1].tolist(), found[-1].item())
