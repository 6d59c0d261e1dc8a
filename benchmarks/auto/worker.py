"""What every worker runs: fleetrun worker.py MODEL OUT KIND MOST

KIND: plans    profile, predict all plans, and run the ones of each kind that are predicted to be best
      search   the whole search, as fleet.distribute runs it
      profile  only the profile, for what-if questions
      plain    data parallelism, timed
MOST: how many plans to run at most
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.auto.models import MODELS
from fleetx import DistributedStrategy, fleet
from fleetx.comm.session import current
from fleetx.planner import profile
from fleetx.planner.cache import StoredProfile
from fleetx.planner.candidates import Candidate, forward_variants, offered
from fleetx.planner.search import Search, compatible
from fleetx.planner.trial import try_out
from fleetx.planner.workload import Workload

LONGEST = 15.0  # seconds per update: plans that are predicted to take longer are not run
TRIALS = 3  # how many plans auto would try


def main(name: str, out: str, kind: str, most: str) -> None:
    fleet.init()
    model = MODELS[name]
    module = model.make()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
    workload = Workload.of(module, optimizer, model.inputs(model.samples), None)
    plans = partial(_plans, most=int(most))
    kinds = {"plans": plans, "search": _search, "profile": _profile, "plain": _plain}
    result = kinds[kind](workload, model.total)
    if fleet.is_first_worker():
        Path(out).write_text(json.dumps({"model": name, "kind": kind, "ranks": fleet.worker_num()} | result))


def _predicted(workload: Workload, total: int | None, allow: str) -> Search:
    world, strategy = current().here(), DistributedStrategy()
    cluster = profile.measure_cluster(world, memory=None, global_batch=total)
    base = strategy.plan().parts
    variants = forward_variants(strategy, cluster, base, allow)
    model = profile.measure_model(workload, base, variants, world, largest=workload.samples, seconds=120)
    search = Search(workload, cluster, model, world, "throughput")
    candidates = offered(strategy, cluster, model, workload.model.parameters(), allow=allow)
    search.predict(list(compatible(candidates, workload, world)))
    return search


def _plans(workload: Workload, total: int, most: int) -> dict[str, Any]:
    start = time.monotonic()
    search = _predicted(workload, total, "lossy")
    seconds = time.monotonic() - start
    rows = []
    for candidate in _selected(search, most):
        candidate.trial = try_out(workload, candidate, current().here(), seconds=600, peak=True)
        rows.append(_row(candidate))
        if fleet.is_first_worker():
            print(rows[-1], flush=True)
    return {
        "plans": rows, "profile_seconds": seconds, "cluster": asdict(search.cluster),
        "considered": len(search.candidates),
    }  # fmt: skip


def _selected(search: Search, most: int) -> list[Candidate]:
    """The first three, which auto would try; then the best of each kind that is not too slow; then the others."""
    kinds: dict[tuple[str, ...], Candidate] = {}
    fitting = [c for c in search.candidates if not c.rejection and c.cost.seconds * c.terms.reduce_every < LONGEST]
    for candidate in fitting:
        kinds.setdefault(tuple(sorted(candidate.chosen)), candidate)
    wanted = list(dict.fromkeys([*fitting[:TRIALS], *kinds.values(), *fitting]))
    return sorted(wanted[:most], key=lambda candidate: candidate.cost.seconds)


def _row(candidate: Candidate) -> dict[str, Any]:
    cost, trial = candidate.cost, candidate.trial
    assert trial is not None
    return {
        "title": candidate.title, "predicted": cost.seconds, "measured": trial.seconds, "predicted_peak": cost.peak,
        "peak": trial.peak, "error": trial.error, "cost": asdict(cost),
    }  # fmt: skip


def _search(workload: Workload, total: int) -> dict[str, Any]:
    start = time.monotonic()
    strategy = DistributedStrategy(auto={"global_batch": total, "cache": False, "allow": "bf16"})
    fleet.distribute(workload.model, workload.optimizer, strategy, sample=workload.inputs)
    return {"seconds": time.monotonic() - start, "text": str(fleet.batch())}


def _profile(workload: Workload, total: int) -> dict[str, Any]:
    search = _predicted(workload, None, "exact")
    return asdict(StoredProfile(search.cluster, search.profile, {}))


def _plain(workload: Workload, total: int) -> dict[str, Any]:
    search = _predicted(workload, None, "exact")
    candidate = next(candidate for candidate in search.candidates if not candidate.chosen)
    candidate.trial = try_out(workload, candidate, current().here(), seconds=600, peak=False)
    return {"plans": [_row(candidate)], "samples": workload.samples}


if __name__ == "__main__":
    main(*sys.argv[1:])
