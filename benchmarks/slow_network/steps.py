"""What the workers run to time steps: python -m benchmarks.slow_network.steps REQUEST, started by fleetrun.

The ways take turns in blocks. In each block a way is built and warmed up on the unshaped link, and then sampled at
every rate, the slowest first.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.slow_network.clock import sampled
from benchmarks.slow_network.model import TITLES, Noise, Sized, longest, shapes_of
from benchmarks.slow_network.shaping import Shaping
from benchmarks.slow_network.ways import STEPS, Way, sgd
from fleetx import fleet

WARM = 6  # steps: DDP sorts its buckets after the first, PowerSGD begins with the third, DGC's residuals fill
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Plan:
    blocks: dict[str, int]  # of each model
    rates: list[str | None]  # the slowest first
    few: int = 3  # samples in a block of what takes a fraction of a second
    slow: int = 1  # of the others, at a rate
    ways: list[str] | None = None
    first: int = 0  # the number of the first block


def main(request: Path) -> None:
    asked = json.loads(request.read_text())
    torch.set_num_threads(1)
    fleet.init(is_collective=True)
    plan = Plan(**asked["plan"])
    shaping = Shaping([tuple(end) for end in asked["ends"]])
    for model, blocks in plan.blocks.items():
        sizes = shapes_of(model)
        noise = Noise(longest(sizes), seed=fleet.worker_index())
        for block in range(plan.first, plan.first + blocks):
            chosen = [way for way in STEPS if plan.ways is None or way.name in plan.ways]
            for way in chosen if block % 2 == 0 else reversed(chosen):
                for row in measured(way, Sized(sizes, noise), plan, shaping):
                    keep(Path(asked["results"]), {"model": model, "block": block, "way": way.name, **row})
                gc.collect()  # a model with hooks is a cycle, and two of them may be too much
    fleet.barrier_worker()


def measured(way: Way, model: Sized, plan: Plan, shaping: Shaping) -> list[dict[str, Any]]:
    loop = way.arm(model, sgd(model, LEARNING_RATE))
    one = torch.ones((), requires_grad=True)

    def step() -> Tensor:
        return loop.step(lambda model: model(one))

    for _ in range(WARM if way.period == 1 else way.period + 1):  # a period ends with the first step
        step()

    def settle() -> None:
        """What is saved has what is under way in it, so it waits. At full speed: the time has been taken."""
        shaping.to(None)
        loop.optimizer.state_dict()

    if way.background:
        settle()
    rows = []
    for rate in plan.rates:
        shaping.to(rate)
        samples = plan.few if way.few or (rate is None and way.period == 1) else plan.slow
        if way.background:
            # Buckets of the next transfer share the link with the last ones of this: one period gives to the next what
            # another takes, so two make a sample, after one without a transfer and one with it.
            found = sampled(step, samples=samples, period=2 * way.period, lead=2 * way.period, settle=settle)
        else:
            found = sampled(step, samples=samples, period=way.period, lead=int(way.few))
        rows.append({"rate": rate, "bytes": model.bytes, **asdict(found)})
    shaping.to(None)
    if way.ours:
        fleet.flush(optimizer=loop.optimizer)  # nothing is left under way
    return rows


def keep(results: Path, row: dict[str, Any]) -> None:
    if fleet.is_first_worker():
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        times = " ".join(f"{seconds:.3f}" for seconds in row["seconds"])
        rate = row["rate"] or "unshaped"
        print(f"{TITLES[row['model']]} {rate:9} {row['way']:12} {times} s, {row['sent'] / 1e6:.3f} MB", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
