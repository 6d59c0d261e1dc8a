"""`fleetx plan`: run the search for a script without training, or answer a what-if question."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from fleetx.base.sizes import parse_bytes
from fleetx.errors import UsageError
from fleetx.parts.auto import PLAN
from fleetx.planner import cache, whatif

_PASSED = ("global_batch", "objective", "allow", "trials")


def plan(script: str, arguments: Sequence[str], given: Mapping[str, Any], fleetrun: Callable[[list[str]], int]) -> int:
    """Start the script with fleetrun; it exits once the plan is made. Returns the exit code."""
    output = Path(given["output"]).absolute()
    cache.check_output(output)
    settings = {key: given[key] for key in _PASSED if given[key] is not None} | {"cache": False, "output": str(output)}
    if given["memory"] is not None and given["nodes"] is None:  # with --nodes, it is that of the other cluster
        settings["memory_budget"] = given["memory"]
    options = [f"--{name}={given[name]}" for name in ("nproc_per_node", "device") if given[name] is not None]
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        with patch.dict(os.environ, {PLAN: yaml.safe_dump(settings), cache.PROFILE: str(profile)}):
            code = fleetrun([*options, script, *arguments])
        if not code and not profile.exists():
            raise UsageError(
                f"{script} ended without calling fleet.distribute(model, optimizer, ..., sample=...): pass sample=... "
                "to fleet.distribute in it"
            )
    return code


def check_question(given: Mapping[str, Any]) -> None:
    """Raise UsageError for options of a what-if question that do not fit together, before anything is measured."""
    if missing := [f"--{name}" for name in ("link", "memory") if given[name] is None]:
        raise UsageError(f"--nodes {given['nodes']} needs {' and '.join(missing)} too")
    if not 0 < given["speed"] < math.inf or not 0 <= given["latency"] < math.inf:
        raise UsageError("--speed must be greater than 0, and --latency at least 0")
    batch, ranks = given["global_batch"], given["nodes"] * given["gpus_per_node"]
    if batch is not None and batch % ranks:
        raise UsageError(f"--global_batch {batch} cannot be split evenly between {ranks} ranks")


def what_if(given: Mapping[str, Any]) -> str:
    """The answer to a what-if question, as text. The options must have been checked."""
    stored = cache.load_profile(given["profile"])
    if stored is None:
        raise UsageError("no profile is stored yet: name a script, which is profiled first, or a file with --profile")
    machine = whatif.Machine(
        nodes=given["nodes"], per_node=given["gpus_per_node"], link=given["link"],
        inner=given["inner_link"] or given["link"], memory=parse_bytes(given["memory"]),
        latency=given["latency"], compute=given["speed"], global_batch=given["global_batch"],
    )  # fmt: skip
    allow = given["allow"] or "exact"
    rows = whatif.rows(machine, stored, allow=allow)
    curves = whatif.curves(machine, stored, allow=allow) if machine.nodes > 1 else []
    if given["plot"] is not None:
        whatif.plot(machine, rows, curves, given["plot"])
    return "\n\n".join([whatif.text(machine, rows), *([whatif.by_link(machine, curves)] if curves else [])])
