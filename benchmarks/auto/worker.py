"""What every worker runs: fleetrun worker.py MODEL OUT KIND MOST

KIND: plans    probe, predict all plans, and run those of each kind that are predicted to be best
      search   the whole search, as fleet.distribute does it
      probe    the probe alone, to ask about other machines
      plain    data parallelism, timed
MOST: plans of a cluster that are run, at most
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
from fleetx.planner import cache, profile
from fleetx.planner.candidates import offered
from fleetx.planner.search import Considered, Search, allowed, ways
from fleetx.planner.trial import tried
from fleetx.planner.workload import Job

LONGEST = 15.0  # seconds of an update: what is predicted to take longer is not run
TRIALS = 3  # what auto would try


def main(name: str, out: str, kind: str, most: str) -> None:
    fleet.init()
    model = MODELS[name]
    module = model.make()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
    job = Job.of(module, optimizer, model.inputs(model.samples), None)
    plans = partial(_plans, most=int(most))
    found = {"plans": plans, "search": _search, "probe": _probe, "plain": _plain}[kind](job, model.total)
    if fleet.is_first_worker():
        Path(out).write_text(json.dumps({"model": name, "kind": kind, "ranks": fleet.worker_num()} | found))


def _looked(job: Job, total: int | None, allow: str) -> Search:
    world, strategy = fleet._here(), DistributedStrategy()
    cluster = profile.cluster(world, memory=None, global_batch=total)
    base = strategy.plan().parts
    work = profile.work(job, base, ways(strategy, cluster, base, allow), world, largest=job.samples, seconds=120)
    search = Search(job, cluster, work, world, "throughput")
    search.predict(list(allowed(offered(strategy, cluster, work, allow=allow), job, world)))
    return search


def _plans(job: Job, total: int, most: int) -> dict[str, Any]:
    begun = time.monotonic()
    search = _looked(job, total, "lossy")
    probed = time.monotonic() - begun
    rows = []
    for one in _chosen(search, most):
        one.trial = tried(job, one.candidate, fleet._here(), seconds=600, peak=True)
        rows.append(_row(one))
        if fleet.is_first_worker():
            print(rows[-1], flush=True)
    return {"plans": rows, "probe_seconds": probed, "cluster": asdict(search.cluster), "considered": len(search.plans)}


def _chosen(search: Search, most: int) -> list[Considered]:
    """The first three, which auto would try; the best of each kind, while they are not too slow; the others."""
    kinds: dict[tuple[str, ...], Considered] = {}
    fitting = [one for one in search.plans if not one.why and _length(one) < LONGEST]
    for one in fitting:
        kinds.setdefault(tuple(sorted(one.candidate.chosen)), one)
    wanted = list(dict.fromkeys([*fitting[:TRIALS], *kinds.values(), *fitting]))
    return sorted(wanted[:most], key=lambda one: one.account.seconds)


def _length(one: Considered) -> float:
    """Seconds until all that happens in turn has happened."""
    return one.account.seconds * one.candidate.terms.every


def _row(one: Considered) -> dict[str, Any]:
    assert one.trial is not None
    return {
        "title": one.candidate.title, "predicted": one.account.seconds, "measured": one.trial.seconds,
        "predicted_peak": one.account.peak, "peak": one.trial.peak, "error": one.trial.error,
        "account": asdict(one.account),
    }  # fmt: skip


def _search(job: Job, total: int) -> dict[str, Any]:
    begun = time.monotonic()
    strategy = DistributedStrategy(auto={"global_batch": total, "cache": False, "allow": "bf16"})
    fleet.distribute(job.model, job.optimizer, strategy, sample=job.inputs)
    return {"seconds": time.monotonic() - begun, "text": str(fleet.batch())}


def _probe(job: Job, total: int) -> dict[str, Any]:
    search = _looked(job, None, "exact")
    if fleet.is_first_worker():
        cache.keep_probe(search.cluster, search.work, {})
    return {"cluster": asdict(search.cluster), "work": search.work.written(), "declared": {}}


def _plain(job: Job, total: int) -> dict[str, Any]:
    search = _looked(job, None, "exact")
    one = next(one for one in search.plans if not one.candidate.chosen)
    one.trial = tried(job, one.candidate, fleet._here(), seconds=600, peak=False)
    return {"plans": [_row(one)], "samples": job.samples}


if __name__ == "__main__":
    main(*sys.argv[1:])
