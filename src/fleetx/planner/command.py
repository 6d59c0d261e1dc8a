"""`fleetx plan`: the search for a script, without its training; and what it would be like elsewhere."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from fleetx.base.sizes import parse_bytes
from fleetx.errors import UsageError
from fleetx.parts.auto import ASKED
from fleetx.planner import cache, whatif

_PASSED = ("global_batch", "objective", "allow", "trials")


def measured(
    script: str, arguments: Sequence[str], given: Mapping[str, Any], fleetrun: Callable[[list[str]], int]
) -> int:
    """Start the script with fleetrun; it ends when the plan is there."""
    settings = {key: given[key] for key in _PASSED if given[key] is not None} | {"cache": False}
    if given["memory"] is not None and given["nodes"] is None:  # with --nodes it is that of the other machine
        settings["memory_budget"] = given["memory"]
    if given["memory"] is not None:
        parse_bytes(given["memory"])  # before anything is started
    words = [f"--{name}={given[name]}" for name in ("nproc_per_node", "device") if given[name] is not None]
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.json"
        os.environ[ASKED], os.environ[cache.PROBE] = yaml.safe_dump(settings), str(probe)
        try:
            code = fleetrun([*words, script, *arguments])
        finally:
            del os.environ[ASKED], os.environ[cache.PROBE]
        if not code and not probe.exists():
            raise UsageError(f"{script} ended without fleet.distribute(model, optimizer, ..., sample=...)")
    return code


def what_if(given: Mapping[str, Any]) -> str:
    """Raises UsageError or ValueError for what cannot be understood."""
    if missing := [f"--{name}" for name in ("link", "memory") if given[name] is None]:
        raise UsageError(f"what if {given['nodes']} nodes: {' and '.join(missing)} must be said too")
    if not 0 < given["speed"] < math.inf or not 0 <= given["latency"] < math.inf:
        raise UsageError("--speed must be above 0, and --latency not below")
    found = cache.probe(given["probe"])
    if found is None:
        raise UsageError("there is no probe yet: name a script, which is measured first, or a file with --probe")
    cluster, work, declared = found
    machine = whatif.Machine(
        nodes=given["nodes"], per_node=given["gpus_per_node"], link=whatif.speed(given["link"]),
        inner=whatif.speed(given["inner_link"] or given["link"]), memory=parse_bytes(given["memory"]),
        latency=given["latency"], compute=given["speed"], global_batch=given["global_batch"],
    )  # fmt: skip
    batch, ranks = given["global_batch"], given["nodes"] * given["gpus_per_node"]
    if batch is not None and batch % ranks:
        raise UsageError(f"--global_batch {batch} cannot be cut evenly for {ranks} ranks")
    rows = whatif.rows(machine, cluster, work, declared, allow=given["allow"] or "exact")
    if given["plot"] is not None:
        whatif.plot(rows, given["plot"])
    return whatif.text(machine, rows)
