"""The script for fleetrun: python -m benchmarks.slow_network.islands.worker REQUEST."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.large_batch.data import Split
from benchmarks.large_batch.worker import agreed, log
from benchmarks.slow_network.islands import times
from benchmarks.slow_network.islands.runs import Kept, Plan, Run, chosen, left, remaining
from benchmarks.slow_network.islands.tasks import TASKS
from benchmarks.slow_network.islands.training import chatter, trained
from benchmarks.slow_network.shaping import Shaping
from fleetx import fleet


def main(request: Path) -> None:
    job = json.loads(request.read_text())
    asked = job["plan"]
    torch.set_num_threads(1)
    fleet.init(is_collective=True)
    plan = Plan(**asked["plan"])
    data = {name: TASKS[name].load(Path(asked["data"])) for name in plan.steps}
    kept = agreed(Kept(Path(asked["runs"])))  # it grows in all workers; the first one also writes
    end = agreed(time.monotonic()) + 60 * asked["minutes"]
    parts = time_all(plan, data, kept, asked, job) if asked["times"] else train_all(plan, data, kept)
    for _ in parts:
        if agreed(time.monotonic()) > end:
            log(f"the {asked['minutes']:g} minutes are over; the same command resumes from here")
            break
    fleet.barrier_worker()


def train_all(plan: Plan, data: dict[str, Split], kept: Kept) -> Iterator[None]:
    background = chatter()
    while (run := next(remaining(plan, kept.outcomes), None)) is not None:
        outcome = agreed(trained(run, data[run.task], background=background))
        if fleet.is_first_worker():
            kept.add(run, outcome)
        kept.outcomes[run] = outcome
        shown = TASKS[run.task].shown
        log(f"{run}: held out {shown(outcome.chosen_on)}, test {shown(outcome.test)}, {outcome.sent / 1e6:.3f} MB, "
            f"{outcome.seconds:.0f} s; {left(plan, kept.outcomes)} left")  # fmt: skip
        yield


def time_all(plan: Plan, data: dict[str, Split], kept: Kept, asked: dict[str, Any], job: Any) -> Iterator[None]:
    shaping = Shaping([tuple(end) for end in job["ends"]])
    for block in range(asked["blocks"]):
        for name in [name for name in plan.steps if name not in plan.settings_of]:
            for way in plan.ways if block % 2 == 0 else reversed(plan.ways):
                run: Run = chosen(plan, name, way, kept.outcomes) or plan.search(name, way)[0]
                for rate in asked["rates"]:
                    if (name, way, rate, block) in kept.timings:
                        continue
                    timing = agreed(times.timed(run, data[name], shaping, rate, block))
                    if fleet.is_first_worker():
                        kept.time(timing)
                    kept.timings[timing.key] = timing
                    log(f"{name:6} {way:14} {rate} block {block}: {1e3 * timing.seconds:.1f} ms per step")
                    yield


if __name__ == "__main__":
    main(Path(sys.argv[1]))
