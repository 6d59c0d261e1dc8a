"""A few real updates of a plan, in a child process of every rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from fleetx.base.trees import tensors_of
from fleetx.comm.world import World
from fleetx.engine.dtensors import local
from fleetx.engine.engine import Engine
from fleetx.engine.reducer import Reducer
from fleetx.engine.scheduled import ScheduledEngine
from fleetx.measure import allocator
from fleetx.measure.block_profile import now
from fleetx.measure.tracker import bytes_of
from fleetx.planner.candidates import Candidate, kept_bytes
from fleetx.planner.children import on_all_ranks
from fleetx.planner.workload import Workload
from fleetx.strategy.stage import Stage

SHORT = 1.0  # seconds: updates are repeated until they take this long in total
MOST = 5  # repetitions


@dataclass(frozen=True)
class Trial:
    seconds: float = 0.0  # per update, on the slowest rank
    peak: int = 0  # bytes of the fullest rank; 0: not measured
    error: str = ""


def try_out(workload: Workload, candidate: Candidate, world: World, *, seconds: float, peak: bool) -> Trial:
    answers = on_all_ranks(partial(_train, candidate, peak), workload, world, seconds=seconds)
    # When one rank dies, the others lose their connection to it: report the cause rather than its consequences.
    if errors := [answer.error for answer in answers if answer.error]:
        return Trial(error=min(errors, key=lambda text: ("memory" not in text, "onnection" in text)))
    return Trial(max(a.value["seconds"] for a in answers), max(a.value["peak"] for a in answers))


def _train(candidate: Candidate, peak: bool, workload: Workload, world: World) -> dict[str, Any]:
    kind = ScheduledEngine if candidate.plan.at(Stage.SCHEDULE) else Engine
    engine = kind(candidate.plan, workload.model, workload.optimizer, world)
    inputs, targets = workload.batch(candidate.feed)
    cycle = candidate.terms.reduce_every  # some updates communicate and others do not

    def update() -> None:
        for _ in range(candidate.terms.merged):
            engine.forward_backward(inputs, targets, workload.loss_fn)
            engine.optimizer.step()
            engine.optimizer.zero_grad()

    for _ in range(cycle):  # warm-up
        update()
    times: list[float] = []
    while not times or (sum(times) < SHORT and len(times) < MOST):
        world.barrier()
        start = now(world.device)
        for _ in range(cycle):
            update()
        times.append(world.largest((now(world.device) - start) / cycle))
    most = _held(engine, (inputs, targets)) + allocator.peak(update, world.device) if peak else 0
    return {"seconds": sorted(times)[len(times) // 2], "peak": most}


def _held(engine: Engine, batch: Any) -> int:
    """Bytes on this rank between updates."""
    state = [s for values in engine.optimizer.state.values() for s in values.values() if isinstance(s, Tensor)]
    tensors = [*engine.model.parameters(), *engine.model.buffers(), *state, *tensors_of(batch)]
    buckets = bytes_of(p for p in engine.names if p.requires_grad) if isinstance(engine.reducer, Reducer) else 0
    return bytes_of(_local(tensors)) + buckets + kept_bytes(engine.plan, _local(engine.names))


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this rank holds of the tensors."""
    return [t for t in map(local, tensors) if t.device.type != "meta"]
