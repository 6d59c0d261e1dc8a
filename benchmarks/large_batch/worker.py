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

from benchmarks.large_batch.data import load
from benchmarks.large_batch.runs import Kept, Outcome, Run
from benchmarks.large_batch.sweep import Plan, following, left
from benchmarks.large_batch.train import train
from fleetx import fleet


def main(request: Path) -> None:
    asked = json.loads(request.read_text())
    torch.set_num_threads(1)
    fleet.init(is_collective=True)
    study(Plan(**asked["plan"]), asked)
    fleet.barrier_worker()


def study(plan: Plan, asked: Mapping[str, Any]) -> None:
    data = load(Path(asked["data"]), hold_out=plan.hold_out)
    kept = Kept(Path(asked["results"]))
    done = agreed(kept.outcomes)
    began, spent = time.monotonic(), []
    while (run := following(plan, done)) is not None:
        if agreed(time.monotonic() - began) > 60 * asked["minutes"]:
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
    accuracy = f"held out {outcome.chosen_on:.2%}, test {outcome.test:.2%}{note}"
    return f"{run}: {accuracy}; {outcome.seconds:.0f} s; about {remaining} runs, {minutes:.0f} min left"


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
