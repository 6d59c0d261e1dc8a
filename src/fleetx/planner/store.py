"""Plans that were chosen before, for the same model, batch, strategy and world; and the last probe, to ask about."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fleetx.bill import Link, Scene
from fleetx.planner.job import Job
from fleetx.planner.work import Work
from fleetx.recompute import store
from fleetx.strategy import DistributedStrategy
from fleetx.world import World

log = logging.getLogger(__name__)
_LAST = "last_probe"


def key(job: Job, strategy: DistributedStrategy, world: World, hosts: list[int]) -> str:
    about = sorted(strategy.declared().items()), world.size, [hosts.count(host) for host in hosts], job.samples
    return store.key(job.step(job.samples, strategy.plan().parts, kept=True), repr(about))


def load(name: str) -> dict[str, Any] | None:
    folder = store.folder("auto")
    try:
        found = json.loads((folder / f"{name}.json").read_text()) if folder is not None else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def save(name: str, data: dict[str, Any]) -> None:
    """Beside, then renamed. A disk that is full or closed costs time only."""
    folder = store.folder("auto")
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / f"{name}.{os.getpid()}"
        beside.write_text(json.dumps(data))
        beside.replace(folder / f"{name}.json")
    except OSError as error:
        log.warning("the chosen plan could not be stored: %s", error)


def keep_probe(scene: Scene, work: Work, declared: dict[str, Any]) -> None:
    save(_LAST, {"scene": asdict(scene), "work": work.written(), "declared": declared})


def probe(path: Path | None) -> tuple[Scene, Work, dict[str, Any]] | None:
    """From a file, or the last one; None: there is none."""
    if path is None:
        found = load(_LAST)
    else:
        found = json.loads(path.read_text())
    if found is None:
        return None
    scene = found["scene"]
    links: dict[str, Any] = {name: Link(**scene[name]) for name in ("flat", "gather", "scatter", "inner", "outer")}
    links["sixteen"] = {name: Link(**link) for name, link in scene["sixteen"].items()}
    return Scene(**(scene | links)), Work.of(found["work"]), found["declared"]
