"""A plan, tried: a few real updates in a child of every rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fleetx.base.trees import tensors_of
from fleetx.comm.world import World
from fleetx.engine.engine import Engine
from fleetx.engine.reducer import Reducer
from fleetx.engine.scheduled import ScheduledEngine
from fleetx.measure import allocator
from fleetx.measure.tracker import bytes_of
from fleetx.planner.candidates import Candidate
from fleetx.planner.profile import together
from fleetx.planner.workload import Job, now
from fleetx.strategy.stage import Stage

SHORT = 1.0  # seconds: of an update that takes less, the median of several counts
MANY = 5


@dataclass(frozen=True)
class Trial:
    seconds: float = 0.0  # of an update, on the slowest rank
    peak: int = 0  # bytes of the fullest rank; 0: not measured
    error: str = ""


def tried(job: Job, candidate: Candidate, world: World, *, seconds: float, peak: bool) -> Trial:
    answers = together(partial(_train, candidate, peak), job, world, seconds)
    # Who is killed breaks the line to the others, who then fail too: the cause is said rather than its consequence.
    errors = [answer.error for answer in answers if answer.error]
    if errors:
        return Trial(error=min(errors, key=lambda text: ("memory" not in text, "onnection" in text)))
    return Trial(max(a.value["seconds"] for a in answers), max(a.value["peak"] for a in answers))


def engine_of(candidate: Candidate, job: Job, world: World) -> Engine:
    kind = ScheduledEngine if candidate.plan.at(Stage.SCHEDULE) else Engine
    return kind(candidate.plan, job.model, job.optimizer, world)


def _train(candidate: Candidate, peak: bool, job: Job, world: World) -> dict[str, Any]:
    engine = engine_of(candidate, job, world)
    inputs, targets = job.batch(candidate.feed)
    cycle = candidate.terms.every  # some updates communicate and others do not

    def update() -> None:
        for _ in range(candidate.terms.merged):
            engine.forward_backward(inputs, targets, job.loss_fn)
            engine.optimizer.step()
            engine.optimizer.zero_grad()

    for _ in range(cycle):  # makes what is made once
        update()
    times: list[float] = []
    while not times or (sum(times) < SHORT and len(times) < MANY):
        world.barrier()
        begun = now(world.device)
        for _ in range(cycle):
            update()
        longest = torch.tensor([(now(world.device) - begun) / cycle], device=world.device)
        world.maximum(longest)
        times.append(longest.item())
    most = _held(engine, (inputs, targets)) + allocator.peak(update, world.device) if peak else 0
    return {"seconds": sorted(times)[len(times) // 2], "peak": most}


def _held(engine: Engine, batch: Any) -> int:
    """Bytes that are there between updates, on this rank."""
    state = [s for values in engine.optimizer.state.values() for s in values.values() if isinstance(s, Tensor)]
    own = [*engine.model.parameters(), *engine.model.buffers(), *state, *tensors_of(batch)]
    buckets = bytes_of(p for p in engine.names if p.requires_grad) if isinstance(engine._reducer, Reducer) else 0
    keeps = sum(part.keeps(_here(engine.names), scaled=False) for part in engine.plan.parts)
    return bytes_of(_here(own)) + buckets + keeps


def _here(tensors: Iterable[Tensor]) -> list[Tensor]:
    found = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return [t for t in found if t.device.type != "meta"]
