"""The workers' side of timing steps: python -m benchmarks.slow_network.steps REQUEST, started by fleetrun.

Methods take turns in blocks. In each block a method is built and warmed up on the unshaped link, and then sampled at
every rate, slowest first.
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
from benchmarks.slow_network.methods import STEPS, Method, sgd
from benchmarks.slow_network.model import TITLES, Noise, Sized, longest, shapes_of
from benchmarks.slow_network.shaping import Shaping
from fleetx import fleet

WARM = 6  # steps: DDP rebuilds its buckets after the first, PowerSGD starts with the third, DGC fills its residuals
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Plan:
    blocks: dict[str, int]  # per model
    rates: list[str | None]  # slowest first
    few: int = 3  # samples per block if a step takes a fraction of a second
    slow: int = 1  # samples per block and rate otherwise
    methods: list[str] | None = None
    first: int = 0  # the number of the first block


def main(request: Path) -> None:
    job = json.loads(request.read_text())
    torch.set_num_threads(1)
    fleet.init(is_collective=True)
    plan = Plan(**job["plan"])
    shaping = Shaping([tuple(end) for end in job["ends"]])
    for model, blocks in plan.blocks.items():
        sizes = shapes_of(model)
        noise = Noise(longest(sizes), seed=fleet.worker_index())
        for block in range(plan.first, plan.first + blocks):
            chosen = [method for method in STEPS if plan.methods is None or method.name in plan.methods]
            for method in chosen if block % 2 == 0 else reversed(chosen):
                for row in measured(method, Sized(sizes, noise), plan, shaping):
                    keep(Path(job["results"]), {"model": model, "block": block, "way": method.name, **row})
                gc.collect()  # models with hooks are reference cycles, and two may not fit in memory
    fleet.barrier_worker()


def measured(method: Method, model: Sized, plan: Plan, shaping: Shaping) -> list[dict[str, Any]]:
    loop = method.prepare(model, sgd(model, LEARNING_RATE))
    one = torch.ones((), requires_grad=True)

    def step() -> Tensor:
        return loop.step(lambda model: model(one))

    for _ in range(WARM if method.period == 1 else method.period + 1):  # a period ends after the first step
        step()

    def settle() -> None:
        """Saving waits for transfers that are under way. At full speed, because timing is over."""
        shaping.to(None)
        loop.optimizer.state_dict()

    if method.background:
        settle()
    rows = []
    for rate in plan.rates:
        shaping.to(rate)
        samples = plan.few if method.few or (rate is None and method.period == 1) else plan.slow
        if method.background:
            # Transfers of consecutive periods share the link, so one period may take time from the next. A sample is
            # therefore two periods, after one period without a transfer and one with it.
            found = sampled(step, samples=samples, period=2 * method.period, lead=2 * method.period, settle=settle)
        else:
            found = sampled(step, samples=samples, period=method.period, lead=int(method.few))
        rows.append({"rate": rate, "bytes": model.bytes, **asdict(found)})
    shaping.to(None)
    if method.ours:
        fleet.flush(optimizer=loop.optimizer)  # finish transfers that are under way
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
