"""Where the time of a step goes: python -m benchmarks.slow_network.timeline --help

The functions in STAGES are timed on every thread, by the clock and in CPU time. The CPU time is that of the thread
alone, and of all its ranks divided by the cores it is a lower bound of the step: no order of the work can be faster.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
import torch.distributed as dist

from benchmarks.netlab import counters
from benchmarks.slow_network import study
from benchmarks.slow_network.methods import STEPS, sgd
from benchmarks.slow_network.model import Noise, Sized, longest, shapes_of
from benchmarks.slow_network.shaping import Shaping
from benchmarks.slow_network.steps import LEARNING_RATE, WARM
from fleetx import fleet

# Module, class or nothing, function.
STAGES = [
    ("fleetx.parts.dgc.exchange", "", "encode"),
    ("fleetx.parts.dgc.exchange", "Exchange", "_add"),
    ("fleetx.parts.dgc", "DGC", "_exchange"),
    ("torch.distributed", "", "all_reduce"),
    ("torch.distributed", "", "reduce"),
    ("torch.distributed", "", "broadcast"),
    ("fleetx.comm.duplex", "", "all_to_all"),
    ("fleetx.comm.duplex", "", "all_gather"),
]


@dataclass
class Log:
    """Calls of one step: name, thread, begin, end, and CPU time of the thread in between."""

    calls: list[tuple[str, str, float, float, float]] = field(default_factory=list)

    def time(self, owner: Any, name: str) -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin, cpu = time.perf_counter(), time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                end, used = time.perf_counter(), time.thread_time() - cpu
                self.calls.append((name.strip("_"), threading.current_thread().name, begin, end, used))

        setattr(owner, name, timed)


def work(request: Path) -> None:
    job = json.loads(request.read_text())
    plan = job["plan"]
    torch.set_num_threads(1)
    fleet.init(is_collective=True)
    shaping = Shaping([tuple(end) for end in job["ends"]])
    log = Log()
    for module, owner, name in STAGES:
        found = importlib.import_module(module)
        log.time(getattr(found, owner) if owner else found, name)
    sizes = shapes_of(plan["model"])
    model = Sized(sizes, Noise(longest(sizes), seed=fleet.worker_index()))
    method = next(m for m in STEPS if m.name == plan["method"])
    loop = method.prepare(model, sgd(model, LEARNING_RATE))
    log.time(loop.optimizer, "step")
    one = torch.ones((), requires_grad=True)
    for _ in range(WARM):
        loop.step(lambda model: model(one))
    shaping.to(plan["rate"])
    rows = []
    for _ in range(plan["steps"]):
        dist.barrier()
        before = counters.here().sent
        log.calls = []
        begin, cpu = time.perf_counter(), time.process_time()
        loop.step(lambda model: model(one))
        seconds = time.perf_counter() - begin
        used = time.process_time() - cpu
        calls = [(name, thread, a - begin, b - begin, c) for name, thread, a, b, c in log.calls]
        dist.barrier()
        total = torch.tensor([used], dtype=torch.float64)
        dist.all_reduce(total)
        sent = counters.here().sent - before
        rows.append({"seconds": seconds, "cpu": used, "all": total.item(), "sent": sent, "calls": calls})
    shaping.to(None)
    if fleet.is_first_worker():
        Path(job["results"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    fleet.barrier_worker()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--method", type=click.Choice([m.name for m in STEPS]), default="dgc16", show_default=True)
@click.option("--model", type=click.Choice(["resnet", "bert"]), default="resnet", show_default=True)
@click.option("--rate", default="100mbit", show_default=True, help="Of the link; none: as fast as the machine.")
@click.option("--workers", default=1, show_default=True, help="Per host.")
@click.option("--steps", default=20, show_default=True)
@click.option("--calls", is_flag=True, help="Also list every call of one step.")
def main(workers: int, calls: bool, **plan: Any) -> None:
    """Time the stages of a step on two hosts, seen from rank 0."""
    plan["rate"] = None if plan["rate"] == "none" else plan["rate"]
    rows = study.run("timeline", plan, workers=workers, quiet=True)

    def middle(key: str) -> float:
        return median(row[key] for row in rows)

    print(f"step: median {1e3 * middle('seconds'):.1f} ms, least {1e3 * min(r['seconds'] for r in rows):.1f} ms")
    shared = middle("all") / (os.cpu_count() or 1)
    print(f"CPU of rank 0: {1e3 * middle('cpu'):.1f} ms; of all ranks / cores: {1e3 * shared:.1f} ms")
    print(f"host 0 sent {middle('sent') / 1e6:.3f} MB")
    for name in dict.fromkeys(call[0] for row in rows for call in row["calls"]):
        found = [[call for call in row["calls"] if call[0] == name] for row in rows]
        clock = median(sum(end - begin for _, _, begin, end, _ in some) for some in found)
        cpu = median(sum(call[4] for call in some) for some in found)
        first, last = median(some[0][2] for some in found if some), median(some[-1][3] for some in found if some)
        print(f"{name:18} {len(found[0]):3} calls, {1e3 * clock:7.1f} ms ({1e3 * cpu:6.1f} CPU), "
              f"from {1e3 * first:7.1f} to {1e3 * last:7.1f}")  # fmt: skip
    if calls:
        row = sorted(rows, key=lambda r: r["seconds"])[len(rows) // 2]
        for name, thread, begin, end, cpu in sorted(row["calls"], key=lambda call: call[2]):
            print(f"{name:18} {thread:18} {1e3 * begin:7.1f} to {1e3 * end:7.1f} ({1e3 * cpu:6.1f} CPU)")


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].endswith("request.json"):
        work(Path(sys.argv[1]))
    else:
        main(prog_name="python -m benchmarks.slow_network.timeline")
