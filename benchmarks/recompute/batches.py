"""The largest batch under one limit, and how fast it is: without recomputation, with it, and with it in bfloat16.

The batch is the largest with every block a segment; at that batch the budget then finds the fastest way within the
limit. torch's own ways are run at the same batch, within the limit or not. Each row has a process of its own: none
begins with the heap of another. Two steps are timed, or one that takes more than a minute; in the same process, before
and after them, two without recomputation at the batch that fits so: a machine that is slower for a while slows both.
The peak is that of another step, because a profiler would be timed along.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from typing import Any

from benchmarks.recompute import measured, ways
from benchmarks.recompute.measured import Row
from benchmarks.recompute.models import MODELS, Model
from fleetx import fleet
from fleetx.base.sizes import parse
from fleetx.measure.fake_step import Step
from fleetx.parts.recompute import budget

BF16 = {"amp": {"dtype": "bfloat16"}}
PEERS = {"every": ways.every_block, "sqrt": ways.square_root}
LONG = 60.0  # seconds: of a step that takes so long, one is enough


def rows(name: str, memory: str) -> Iterator[Row]:
    model = MODELS[name]
    by_name = {"recompute": {"checkpoints": list(model.present())}}
    plain = _alone(_ours, model.name, "no recomputation", {}, memory, None)
    yield plain
    row = _alone(_ours, model.name, "memory_budget", by_name, memory, plain["batch"])
    yield row
    yield _alone(_ours, model.name, "memory_budget, amp in bfloat16", by_name | BF16, memory, plain["batch"])
    for peer in PEERS if max(row["seconds"]) < LONG else ("every",):
        yield _alone(_peer, model.name, peer, row["batch"], memory, plain["batch"])


def _alone(call: Any, *arguments: Any) -> Row:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as child:
        row: Row = child.submit(call, *arguments).result()
        return row


def _ours(name: str, title: str, switches: dict[str, Any], memory: str, beside: int | None) -> Row:
    model = MODELS[name]
    module = model.make()
    strategy = fleet.DistributedStrategy(**switches)
    optimizer = measured.adamw(module)
    found = fleet.largest_batch(
        module, model.inputs(1), memory=memory, strategy=strategy, optimizer=optimizer, trial=False
    )
    way = ways.Way("plain", title, nullcontext, found.predicted)
    if "recompute" in switches:
        parts = [part for part in strategy.plan().parts if part.changes_forward]
        step = Step(module, optimizer, kwargs=model.inputs(found.micro), parts=parts)
        choice = budget.choose(step, f"{parse(memory)}B")
        active = choice.arm(module, nullcontext) if choice.tree else nullcontext
        way = ways.Way("ours", title, active, choice.peak)
    return _row(model, module, optimizer, way, found.micro, memory, beside or found.micro, bf16="amp" in switches)


def _peer(name: str, peer: str, batch: int, memory: str, beside: int) -> Row:
    model = MODELS[name]
    module = model.make()
    return _row(model, module, measured.adamw(module), PEERS[peer](model, module), batch, memory, beside)


def _row(
    model: Model, module: Any, optimizer: Any, way: ways.Way, batch: int, memory: str, beside: int,
    *, bf16: bool = False,
) -> Row:  # fmt: skip
    inputs, small = model.inputs(batch), model.inputs(beside)

    def plain() -> list[float]:
        return [measured.once(module, optimizer, small, nullcontext) for _ in range(2)]

    measured.once(module, optimizer, model.inputs(1), nullcontext)  # makes the state of the optimizer
    without = plain()
    seconds = [measured.once(module, optimizer, inputs, way.active, bf16=bf16)]
    if seconds[0] < LONG:
        seconds.append(measured.once(module, optimizer, inputs, way.active, bf16=bf16))
    without += plain()
    peak, _ = measured.peak_and_seconds(module, optimizer, inputs, way.active, bf16=bf16)
    return {
        "model": model.name, "setting": way.title, "memory": memory, "batch": batch, "predicted": way.predicted,
        "peak": peak, "seconds": seconds, "beside": beside, "without": without,
    }  # fmt: skip
