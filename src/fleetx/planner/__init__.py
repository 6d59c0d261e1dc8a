"""`auto`: measure, predict, try, choose, explain.

    workload.py          the model, the optimizer and the batch to measure with
    profile.py           measures the cluster (link_benchmark.py) and the model (model_profile.py)
    candidates.py        every plan that the parts offer, that composes, and that splits the batch evenly
    cost.py              adds up the terms of a plan: predicted seconds and bytes
    search.py trial.py   rank all candidates, try the best in child processes (children.py), choose the winner
    report.py            which plans were considered, and why the winner won
    cache.py             earlier results, the winner as YAML, and profiles
    whatif.py            predictions for another cluster, from a stored profile
    command.py           `fleetx plan`
    branches.py          `fleetx batch`: trainings that branch from one checkpoint, with different batches
    critical_batch.py    what the losses of the branches say about the critical batch
    plots.py             the plots of both commands

All ranks run a search together. What only one of them measures is sent to the others, so that all make the same choice.
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
from fleetx.planner.candidates import Candidate, declared, forward_variants, offered
from fleetx.planner.children import on_rank_0
from fleetx.planner.search import Search, compatible
from fleetx.planner.workload import Workload
from fleetx.strategy import DistributedStrategy

NO_SAMPLE = (
    "strategy.auto needs a batch to measure with. Add two lines:\n"
    "    x, y = next(iter(loader))\n"
    "    model, optimizer = fleet.distribute(model, optimizer, strategy, sample=(x, y), loss_fn=loss_fn)\n"
    "If the model returns its loss: sample=batch, without loss_fn"
)
PIPELINE = (
    "a pipeline: call fleet.forward_backward(batch) instead of model(x) and loss.backward(), and give all ranks of a "
    "replica the same batch (fleet.replica_index(), fleet.replica_num())"
)


@dataclass(frozen=True)
class Chosen:
    """The strategy that auto chose, which includes how the batch is split (`batch`)."""

    strategy: DistributedStrategy
    text: str  # the explanation
    path: str  # where the strategy was written; empty if auto_configs['output'] is not set


def choose(
    model: nn.Module, optimizer: Optimizer, strategy: DistributedStrategy, world: World, *,
    sample: Any, loss_fn: Callable[..., Tensor] | None,
) -> Chosen:  # fmt: skip
    """Choose a strategy. Every rank must call this. Raises StrategyError if no plan fits."""
    settings, batch = strategy.auto_configs, strategy.auto_configs["global_batch"]
    if sample is None:
        raise UsageError(NO_SAMPLE)
    if strategy.batch:
        raise UsageError("strategy.auto chooses how the batch is split: remove strategy.batch, or turn auto off")
    if batch is not None and batch < world.size:
        raise UsageError(f"auto_configs['global_batch'] = {batch}: {world.size} ranks need at least one sample each")
    check(strategy.plan(), model, optimizer, world)
    output = Path(settings["output"]) if settings["output"] else None
    if output is not None:
        on_rank_0(world, lambda: cache.check_output(output))
    workload = Workload.of(model, optimizer, sample, loss_fn).with_sample_of_rank_0(world)
    name = cache.key(workload, strategy, world, world.hosts())
    known = on_rank_0(world, lambda: cache.load(name) if settings["cache"] else None)
    if known is not None:
        chosen, lines = DistributedStrategy(**known["declared"]), [known["text"]]
        lines.append("found in the cache: set auto_configs['cache'] = False to search again")
    else:
        with preserve_rng():
            best, text = _search(workload, strategy, world, settings)
        chosen, lines = best.strategy, [text]
        if world.rank == 0 and settings["cache"]:
            cache.save(name, chosen.declared(), text)
    if output is not None:
        on_rank_0(world, lambda: cache.write_output(output, chosen))
        lines.append(f'written to {output}: DistributedStrategy.load("{output}") repeats this run without a search')
    if any(part.divides and part.span(model, world) > 1 for part in chosen.plan().parts):
        lines.append(PIPELINE)
    return Chosen(chosen, "\n".join(lines), str(output or ""))


def _search(workload: Workload, strategy: DistributedStrategy, world: World, settings: Any) -> tuple[Candidate, str]:
    start = time.monotonic()
    memory, batch, allow = settings["memory_budget"], settings["global_batch"], settings["allow"]
    memory = parse_bytes(memory) if isinstance(memory, str) else memory
    cluster = profile.measure_cluster(world, memory=memory, global_batch=batch)
    base = strategy.plan().parts
    model = profile.measure_model(
        workload, base, forward_variants(strategy, cluster, base, allow), world,
        largest=max(workload.samples, (batch or 0) // world.size), seconds=max(settings["max_seconds"], 60),
    )  # fmt: skip
    if world.rank == 0:
        cache.StoredProfile(cluster, model, declared(strategy)).save()
    candidates = offered(strategy, cluster, model, workload.model.parameters(), allow=allow)
    search = Search(workload, cluster, model, world, settings["objective"])
    search.predict(list(compatible(candidates, workload, world)))
    search.refine(max(settings["trials"], 1))
    search.try_out(settings["trials"], start + settings["max_seconds"])
    best = search.winner()
    return best, report.explanation(search, best, time.monotonic() - start)
