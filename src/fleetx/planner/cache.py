"""Stored results: plans chosen for the same model, batch, strategy and world; the strategy file that the user asked
for, which repeats the run without a search; and profiles for what-if."""

from __future__ import annotations

import inspect
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from fleetx import __version__
from fleetx.base import cache
from fleetx.base.files import write_atomic
from fleetx.base.trees import tensors_of
from fleetx.comm.world import World
from fleetx.errors import UsageError
from fleetx.measure.fake_step import step_key
from fleetx.planner.model_profile import ModelProfile
from fleetx.planner.profile import host_memory
from fleetx.planner.workload import Workload
from fleetx.strategy import DistributedStrategy
from fleetx.strategy.cost_model import Cluster

PROFILE = "FLEETX_PLAN_PROFILE"  # an environment variable that names a file to write the profile to as well
MARK = "# chosen by fleetx: strategy.auto"  # the first line of a strategy file
_KIND, _LAST = "auto", "last_profile"
_VERSION = 3  # of the format of plans and profiles


# --- plans ----------------------------------------------------------------------------------------
def key(workload: Workload, strategy: DistributedStrategy, world: World, hosts: list[int]) -> str:
    declared = strategy.declared()
    declared["auto_configs"] = {k: v for k, v in declared.get("auto_configs", {}).items() if k != "output"}
    about = (
        _VERSION, __version__, sorted(declared.items()), world.size, [hosts.count(host) for host in hosts],
        workload.samples, [(tuple(t.shape), str(t.dtype)) for t in tensors_of(workload.targets)], host_memory(),
        _source(workload.loss_fn), sorted({_source(type(module)) for module in workload.model.modules()}),
    )  # fmt: skip
    return step_key(workload.step(workload.samples, strategy.plan().parts), repr(about))


def _source(thing: Any) -> str:
    """The user's code, if it can be read: a changed forward or loss needs a new search."""
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):
        return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def load(name: str) -> dict[str, Any] | None:
    data = cache.load(_KIND, name)
    return data if isinstance(data, dict) and data.keys() >= {"declared", "text"} else None


def save(name: str, declared: dict[str, Any], text: str) -> None:
    cache.save(_KIND, name, {"declared": declared, "text": text})


# --- the user's file ------------------------------------------------------------------------------
def check_output(path: Path) -> None:
    """Raise UsageError before the search if the file cannot be written, or is not a result of auto."""
    if not path.parent.is_dir():
        raise UsageError(f"auto_configs['output'] = {str(path)!r}: the folder does not exist: create it first")
    if path.exists() and not (path.is_file() and path.read_bytes().startswith(MARK.encode())):
        raise UsageError(
            f"auto_configs['output'] = {str(path)!r}: the file exists, and auto did not write it: choose another name"
        )


def write_output(path: Path, strategy: DistributedStrategy) -> None:
    declared = strategy.declared()
    declared["batch"] = declared.pop("batch_configs")
    write_atomic(path, f"{MARK}\n{yaml.safe_dump(declared, sort_keys=False, default_flow_style=None, width=120)}")


# --- profiles -------------------------------------------------------------------------------------
@dataclass(frozen=True)
class StoredProfile:
    """What a what-if question needs to know about a model and the cluster on which it was profiled."""

    cluster: Cluster
    model: ModelProfile
    declared: dict[str, Any]
    version: int = _VERSION

    def save(self) -> None:
        data = asdict(self)
        cache.save(_KIND, _LAST, data)
        if path := os.environ.get(PROFILE):
            Path(path).write_text(json.dumps(data))


def load_profile(path: Path | None) -> StoredProfile | None:
    """Read a profile from a file, or the last one that was stored; None if there is none."""
    folder = cache.folder(_KIND)
    file = path or (folder / f"{_LAST}.json" if folder is not None else None)
    if file is None or not file.exists():
        return None
    try:
        data = json.loads(file.read_text())
        if data["version"] != _VERSION:
            raise ValueError(f"format {data['version']} instead of {_VERSION}")
        return TypeAdapter(StoredProfile).validate_python(data)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{file} is not a profile that this version of fleetx can read ({error!r}): run `fleetx plan SCRIPT` again"
        ) from None
