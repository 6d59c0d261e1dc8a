"""`auto`: measure, predict, choose, explain.

    probe.py        what the model asks of this device, and how fast ranks talk: measured
    candidates.py   every plan that the parts offer, that composes, and that cuts the batch evenly
    cost.py         the terms of a plan, added up to seconds and bytes
    search.py       predict all, try the best in children, take the winner
    report.py       what was considered and why; the winner as YAML
    whatif.py       the same for another machine, from a stored probe

Ranks go through it together; what one of them alone finds out is told to the others, so that all take the same plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fleetx.base.sizes import parse_bytes
from fleetx.comm.world import World
from fleetx.engine.checks import check
from fleetx.errors import UsageError
from fleetx.measure.fake_step import preserve_rng
from fleetx.planner import cache, profile, report
from fleetx.planner.candidates import declared, offered
from fleetx.planner.search import Search, allowed, ways
from fleetx.planner.workload import Job, from_first
from fleetx.strategy import DistributedStrategy

NO_SAMPLE = (
    "strategy.auto needs a batch to measure with. Add two lines:\n"
    "    x, y = next(iter(loader))\n"
    "    model, optimizer = fleet.distribute(model, optimizer, strategy, sample=(x, y), loss_fn=loss_fn)\n"
    "Where the model returns its loss: sample=batch, without loss_fn"
)

ONLY_FORM = (
    "a pipeline: call fleet.forward_backward(batch) instead of model(x) and loss.backward(), and give all ranks of one "
    "replica the same batch (fleet.replica_index(), fleet.replica_num())"
)


@dataclass(frozen=True)
class Chosen:
    """What auto chose. Each rank is given `feed` samples at a time; `merged` such steps make an update."""

    strategy: DistributedStrategy
    feed: int
    merged: int
    replicas: int
    text: str  # the explanation
    path: str  # where the strategy was written

    @property
    def total(self) -> int:
        return self.feed * self.merged * self.replicas

    def __str__(self) -> str:
        return self.text


def choose(
    model: nn.Module, optimizer: Optimizer, strategy: DistributedStrategy, world: World, *,
    sample: Any, loss_fn: Callable[..., Tensor] | None,
) -> Chosen:  # fmt: skip
    """Every rank must call it. Raises StrategyError where no plan fits."""
    if sample is None:
        raise UsageError(NO_SAMPLE)
    check(strategy.plan(), model, optimizer, world)
    job = Job.of(model, optimizer, sample, loss_fn).shared(world)
    settings = strategy.auto_configs
    batch = settings["global_batch"]
    if batch is not None and batch < world.size:
        raise UsageError(f"auto_configs['global_batch'] = {batch}: each of {world.size} ranks needs a sample")
    name = cache.key(job, strategy, world, world.hosts())
    known = from_first(world, lambda: cache.load(name) if settings["cache"] else None)
    if known is None:
        with preserve_rng():
            known = _searched(job, strategy, world, settings)
        if world.rank == 0 and settings["cache"]:
            cache.save(name, known)
    else:
        known["text"] += "\nchosen before, for the same model, batch and world: auto_configs['cache'] = False asks anew"
    made = known["declared"], known["equation"]
    path = from_first(world, lambda: report.write(*made, Path.cwd()))
    chosen = DistributedStrategy(**known["declared"])
    lines = [known["text"]]
    if path:
        lines.append(f"written to {path}: DistributedStrategy.load of it repeats the run without auto")
    if any(part.divides and part.span(model, world) > 1 for part in chosen.plan().parts):
        lines.append(ONLY_FORM)
    return Chosen(chosen, known["feed"], known["merged"], known["replicas"], "\n".join(lines), path)


def _searched(job: Job, strategy: DistributedStrategy, world: World, settings: Any) -> dict[str, Any]:
    begun = time.monotonic()
    until = begun + settings["max_seconds"]
    base = strategy.plan().parts
    memory = settings["memory_budget"]
    cluster = profile.cluster(
        world, memory=parse_bytes(memory) if isinstance(memory, str) else memory, global_batch=settings["global_batch"]
    )
    forms = ways(strategy, cluster, base, settings["allow"])
    share = (settings["global_batch"] or 0) // world.size
    work = profile.work(
        job, base, forms, world, largest=max(job.samples, share), seconds=max(settings["max_seconds"], 60)
    )
    if world.rank == 0:
        cache.keep_probe(cluster, work, declared(strategy))
    plans = list(allowed(offered(strategy, cluster, work, allow=settings["allow"]), job, world))
    search = Search(job, cluster, work, world, settings["objective"])
    search.predict(plans)
    search.sharpen(max(settings["trials"], 1))
    search.try_out(settings["trials"], until)
    best = search.winner()
    return {
        "declared": best.candidate.strategy.declared(), "feed": best.candidate.feed,
        "merged": best.candidate.terms.merged, "replicas": best.candidate.terms.replicas,
        "equation": best.candidate.equation, "text": report.full(search, best, time.monotonic() - begun),
    }  # fmt: skip
