"""The largest batch within one limit and its speed: without recomputation, with it, and with it in bfloat16.

The batch is the largest that fits if every block is a segment; the budget then finds the fastest plan for that batch.
torch's own methods run at the same batch, whether or not they stay within the limit. Each row runs in a process of its
own, so that none inherits the heap of another. Two steps are timed, or one if it takes more than a minute. Before and
after them, in the same process, two steps without recomputation are timed at the batch that fits then: a machine that
is slower for a while slows both. The peak is that of another step, because the profiler would slow a timed one.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from typing import Any

from benchmarks.recompute import measured, methods
from benchmarks.recompute.measured import Row
from benchmarks.recompute.models import MODELS, Model
from fleetx import fleet
from fleetx.base.sizes import parse_bytes
from fleetx.measure.fake_step import TrainingStep
from fleetx.parts.recompute import budget

BF16 = {"amp": {"dtype": "bfloat16"}}
PEERS = {"every": methods.every_block, "sqrt": methods.square_root}
LONG = 60.0  # seconds: one step is enough if it takes longer


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


def _ours(name: str, title: str, switches: dict[str, Any], memory: str, small_batch: int | None) -> Row:
    model = MODELS[name]
    module = model.make()
    strategy = fleet.DistributedStrategy(**switches)
    optimizer = measured.adamw(module)
    found = fleet.largest_batch(
        module, model.inputs(1), memory=memory, strategy=strategy, optimizer=optimizer, trial=False
    )
    method = methods.Method("plain", title, nullcontext, found.predicted)
    if "recompute" in switches:
        parts = [part for part in strategy.plan().parts if part.changes_forward]
        step = TrainingStep(module, optimizer, kwargs=model.inputs(found.micro), parts=parts)
        plan = budget.choose(step, f"{parse_bytes(memory)}B")
        active = plan.install(module, nullcontext) if plan.tree else nullcontext
        method = methods.Method("ours", title, active, plan.peak)
    return _row(
        model, module, optimizer, method, found.micro, memory, small_batch or found.micro, bf16="amp" in switches
    )


def _peer(name: str, peer: str, batch: int, memory: str, small_batch: int) -> Row:
    model = MODELS[name]
    module = model.make()
    return _row(model, module, measured.adamw(module), PEERS[peer](model, module), batch, memory, small_batch)


def _row(
    model: Model, module: Any, optimizer: Any, method: methods.Method, batch: int, memory: str, small_batch: int,
    *, bf16: bool = False,
) -> Row:  # fmt: skip
    inputs, small = model.inputs(batch), model.inputs(small_batch)

    def plain() -> list[float]:
        return [measured.once(module, optimizer, small, nullcontext) for _ in range(2)]

    measured.once(module, optimizer, model.inputs(1), nullcontext)  # creates the optimizer's state
    without = plain()
    seconds = [measured.once(module, optimizer, inputs, method.active, bf16=bf16)]
    if seconds[0] < LONG:
        seconds.append(measured.once(module, optimizer, inputs, method.active, bf16=bf16))
    without += plain()
    peak, _ = measured.peak_and_seconds(module, optimizer, inputs, method.active, bf16=bf16)
    return {
        "model": model.name, "setting": method.title, "memory": memory, "batch": batch, "predicted": method.predicted,
        "peak": peak, "seconds": seconds, "beside": small_batch, "without": without,
    }  # fmt: skip
