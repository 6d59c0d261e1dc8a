"""The largest batch under one limit, and how fast it is: without recomputation, with it, and with it in bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

from benchmarks.recompute import measured
from benchmarks.recompute.measured import Row
from benchmarks.recompute.models import MODELS
from fleetx import fleet
from fleetx.memory.trace import Step
from fleetx.recompute import budget

SETTINGS = {
    "no recomputation": {},
    "recompute": {"recompute": {"memory_budget": "min"}},
    "recompute, amp in bfloat16": {"recompute": {"memory_budget": "min"}, "amp": {"dtype": "bfloat16"}},
}


def rows(name: str, memory: str) -> Iterator[Row]:
    model = MODELS[name]
    for title, switches in SETTINGS.items():
        module = model.make()
        strategy = fleet.DistributedStrategy(**switches)  # type: ignore[arg-type]
        optimizer = measured.adamw(module)
        found = fleet.largest_batch(
            module, model.inputs(1), memory=memory, strategy=strategy, optimizer=optimizer, trial=False
        )
        inputs = model.inputs(found.micro)
        parts = [part for part in strategy.plan().parts if part.local]
        active = nullcontext
        if switches:
            step = Step(module, optimizer, kwargs=inputs, parts=parts)
            choice = budget.choose(step, memory)  # within the limit the fastest, at this batch
            active = choice.arm(module, nullcontext) if choice.tree else nullcontext
        bf16 = "amp" in switches
        measured.once(module, optimizer, model.inputs(1), nullcontext, bf16=bf16)  # the state of the optimizer
        times = [measured.once(module, optimizer, inputs, active, bf16=bf16) for _ in range(2)]
        peak = measured.peak(module, optimizer, inputs, active, bf16=bf16)
        yield {
            "model": name, "setting": title, "memory": memory, "batch": found.micro, "predicted": found.predicted,
            "peak": peak, "seconds": times,
        }  # fmt: skip
