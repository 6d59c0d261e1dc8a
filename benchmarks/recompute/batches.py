"""The largest batch under one limit, and how fast it is: without recomputation, with it, and with it in bfloat16.

The batch is the largest with every block a segment; at that batch the budget then finds the fastest way within the
limit. One step of each, after one of a single sample: on two cores a step of so many takes minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from benchmarks.recompute import measured
from benchmarks.recompute.measured import Row
from benchmarks.recompute.models import MODELS, Model
from fleetx import fleet
from fleetx.memory.sizes import parse
from fleetx.memory.trace import Step
from fleetx.recompute import budget

BF16 = {"amp": {"dtype": "bfloat16"}}


def rows(name: str, memory: str) -> Iterator[Row]:
    model = MODELS[name]
    by_name = {"recompute": {"checkpoints": list(model.present())}}
    yield _row(model, "no recomputation", {}, memory)
    yield _row(model, "recompute", by_name, memory)
    yield _row(model, "recompute, amp in bfloat16", by_name | BF16, memory)


def _row(model: Model, title: str, switches: dict[str, Any], memory: str) -> Row:
    module = model.make()
    strategy = fleet.DistributedStrategy(**switches)
    optimizer = measured.adamw(module)
    found = fleet.largest_batch(
        module, model.inputs(1), memory=memory, strategy=strategy, optimizer=optimizer, trial=False
    )
    inputs, bf16, active, predicted = model.inputs(found.micro), "amp" in switches, nullcontext, found.predicted
    if "recompute" in switches:
        parts = [part for part in strategy.plan().parts if part.local]
        choice = budget.choose(Step(module, optimizer, kwargs=inputs, parts=parts), f"{parse(memory)}B")
        active, predicted = (choice.arm(module, nullcontext) if choice.tree else nullcontext), choice.peak
    measured.once(module, optimizer, model.inputs(1), nullcontext, bf16=bf16)  # makes the state of the optimizer
    peak, seconds = measured.peak_and_seconds(module, optimizer, inputs, active, bf16=bf16)
    return {
        "model": model.name, "setting": title, "memory": memory, "batch": found.micro, "predicted": predicted,
        "peak": peak, "seconds": [seconds],
    }  # fmt: skip
