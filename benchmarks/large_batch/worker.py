"""What fleetrun starts: the whole study in each worker, because starting a worker takes as long as a short run.

The workers need no orders. The next run follows from the outcomes so far, and these are the same on all of them.
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
            say(f"the time of {asked['minutes']:g} minutes is over; the same command goes on from here")
            return
        outcome = agreed(train(run, data))  # equal anyway but for the seconds
        done[run] = outcome
        if fleet.is_first_worker():
            kept.add(run, outcome)
        spent.append(outcome.seconds)
        say(progress(run, outcome, spent, left(plan, done)))


def progress(run: Run, outcome: Outcome, spent: list[float], remaining: int) -> str:
    recent = spent[-20:]
    minutes = remaining * sum(recent) / len(recent) / 60
    lost = "" if outcome.loss is not None else " (diverged)"
    accuracy = f"held out {outcome.chosen_on:.2%}, test {outcome.test:.2%}{lost}"
    return f"{run}: {accuracy}; {outcome.seconds:.0f} s; about {remaining} runs, {minutes:.0f} min left"


def agreed(value: Any) -> Any:
    """What the first worker has."""
    box = [value]
    if fleet.worker_num() > 1:
        dist.broadcast_object_list(box)
    return box[0]


def say(line: str) -> None:
    if fleet.is_first_worker():
        print(line, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
