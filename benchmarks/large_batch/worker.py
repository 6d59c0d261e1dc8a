"""The script for fleetrun: the entire study in each worker, because starting a worker takes as long as a short run.

No coordination is needed: the next run follows from the outcomes so far, which are the same in all workers.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.large_batch.runs import Kept, Outcome, Run
from benchmarks.large_batch.sweep import Plan, following, left
from benchmarks.large_batch.tasks import TASKS
from benchmarks.large_batch.train import train
from fleetx import fleet


def main(request: Path) -> None:
    asked = json.loads(request.read_text())
    torch.set_num_threads(1)
    fleet.init(is_collective=True)
    end = agreed(time.monotonic()) + 60 * asked["minutes"]
    for plan in asked["plans"]:
        study(Plan(**plan), asked, end)
    fleet.barrier_worker()


def study(plan: Plan, asked: Mapping[str, Any], end: float) -> None:
    """end: when no further run may begin, on the clock of the first worker."""
    task = TASKS[plan.task]
    data = task.load(Path(asked["data"]), plan.samples)
    kept = Kept(Path(asked["results"]))
    done, spent = agreed(kept.outcomes), list[float]()
    while (run := following(plan, done)) is not None:
        if agreed(time.monotonic()) > end:
            log(f"the {asked['minutes']:g} minutes are over; the same command resumes from here")
            return
        outcome = agreed(train(run, data))  # only the seconds differ
        done[run] = outcome
        if fleet.is_first_worker():
            kept.add(run, outcome)
        spent.append(outcome.seconds)
        log(progress(run, outcome, spent, left(plan, done)))


def progress(run: Run, outcome: Outcome, spent: list[float], remaining: int) -> str:
    recent = spent[-20:]
    minutes = remaining * sum(recent) / len(recent) / 60
    note = "" if outcome.loss is not None else " (diverged)"
    shown = TASKS[run.task].shown
    scores = f"held out {shown(outcome.chosen_on)}, test {shown(outcome.test)}{note}"
    return f"{run}: {scores}; {outcome.seconds:.0f} s; about {remaining} runs, {minutes:.0f} min left"


def agreed(value: Any) -> Any:
    """The value of the first worker."""
    box = [value]
    if fleet.worker_num() > 1:
        dist.broadcast_object_list(box)
    return box[0]


def log(line: str) -> None:
    if fleet.is_first_worker():
        print(line, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
