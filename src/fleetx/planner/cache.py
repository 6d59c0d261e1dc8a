"""Plans that were chosen before, for the same model, batch, strategy and world; and the last probe, to ask about."""

from __future__ import annotations

import inspect
import json
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fleetx import __version__
from fleetx.base import cache
from fleetx.base.trees import tensors_of
from fleetx.comm.world import World
from fleetx.errors import UsageError
from fleetx.measure import step_key
from fleetx.planner import link_benchmark
from fleetx.planner.model_profile import Work
from fleetx.planner.workload import Job
from fleetx.strategy import DistributedStrategy
from fleetx.strategy.cost_model import Cluster, Link

log = logging.getLogger(__name__)
_LAST = "last_probe"
_VERSION = 2  # of what is stored
_FIELDS = {"declared", "equation", "text", "feed", "merged", "replicas"}
PROBE = "FLEETX_PLAN_PROBE"  # a file to which the probe is written too


def key(job: Job, strategy: DistributedStrategy, world: World, hosts: list[int]) -> str:
    about = (
        _VERSION, __version__, sorted(strategy.declared().items()), world.size, [hosts.count(host) for host in hosts],
        job.samples, [(tuple(t.shape), str(t.dtype)) for t in tensors_of(job.targets)], link_benchmark.memory(),
        _code(job.loss_fn), sorted({_code(type(module)) for module in job.model.modules()}),
    )  # fmt: skip
    return step_key.key(job.step(job.samples, strategy.plan().parts, kept=True), repr(about))


def _code(thing: Any) -> str:
    """What the user wrote, as far as it can be read: another forward, or another loss, is another job."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def load(name: str) -> dict[str, Any] | None:
    folder = cache.folder("auto")
    try:
        found = json.loads((folder / f"{name}.json").read_text()) if folder is not None else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.keys() >= _FIELDS else None


def save(name: str, data: dict[str, Any]) -> None:
    """Beside, then renamed. A disk that is full or closed costs time only."""
    folder = cache.folder("auto")
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / f"{name}.{os.getpid()}"
        beside.write_text(json.dumps(data))
        beside.replace(folder / f"{name}.json")
    except OSError as error:
        log.warning("the chosen plan could not be stored: %s", error)


def keep_probe(cluster: Cluster, work: Work, declared: dict[str, Any]) -> None:
    data = {"cluster": asdict(cluster), "work": work.written(), "declared": declared}
    save(_LAST, data)
    if asked := os.environ.get(PROBE):
        Path(asked).write_text(json.dumps(data))


def probe(path: Path | None) -> tuple[Cluster, Work, dict[str, Any]] | None:
    """From a file, or the last one; None: there is none."""
    folder = cache.folder("auto")
    file = path or (folder / f"{_LAST}.json" if folder is not None else None)
    if file is None or not file.exists():
        return None
    try:
        return _probe(json.loads(file.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file} is no probe of this version of fleetx: {error!r}") from None


def _probe(found: dict[str, Any]) -> tuple[Cluster, Work, dict[str, Any]]:
    cluster = found["cluster"]
    links: dict[str, Any] = {name: Link(**cluster[name]) for name in ("flat", "gather", "scatter", "inner", "outer")}
    links["sixteen"] = {name: Link(**link) for name, link in cluster["sixteen"].items()}
    return Cluster(**(cluster | links)), Work.of(found["work"]), found["declared"]
