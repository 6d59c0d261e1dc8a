"""Time steps on a shaped link. Methods take turns in blocks, so that each is beside `no communication`.

Only the time per step is measured, over whole periods; that of a training is this times its steps.
"""

from __future__ import annotations

import gc
import math
from dataclasses import replace

import torch.distributed as dist

from benchmarks.frame import machine
from benchmarks.large_batch.data import Split
from benchmarks.slow_network.clock import sampled
from benchmarks.slow_network.islands.runs import Run, Timing
from benchmarks.slow_network.islands.training import Training
from benchmarks.slow_network.islands.ways import BY_NAME, Way
from benchmarks.slow_network.shaping import Shaping

RATES = ["100mbit", "1gbit"]
BLOCKS = 3
STEPS = 128  # at least, in whole periods
SLOW_STEPS = 8  # of a method whose steps are long
WARM = 9


def stretch(way: Way, steps: int) -> tuple[int, int]:
    """Steps that are not timed, and steps that are: whole periods, or almost a whole training."""
    lead = WARM + (way.period if way.background else 0)  # until a transfer of the last period is under way
    if way.whole:
        return WARM, steps - WARM
    wanted = SLOW_STEPS if way.slow else STEPS
    timed = way.period * math.ceil(wanted / way.period)
    if lead + timed > steps:
        timed = max(1, (steps - lead) // way.period) * way.period
    return lead, timed


def timed(run: Run, data: Split, shaping: Shaping, rate: str | None, block: int) -> Timing:
    load = machine.load()[0]
    lead, steps = stretch(BY_NAME[run.way], run.steps)
    training = Training(replace(run, steps=max(run.steps, lead + steps)), data)
    for _ in range(WARM):
        training.step()
    shaping.to(rate)
    found = sampled(training.step, samples=1, period=steps, lead=lead - WARM)
    shaping.to(None)
    training.loop.end()
    dist.barrier()
    del training
    gc.collect()
    return Timing(run.task, run.way, rate, block, steps, found.seconds[0], found.sent, load)
