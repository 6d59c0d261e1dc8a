"""Run one measurement: a lab, workers started in it by fleetrun, and the rows that they write."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.netlab import Lab
from benchmarks.slow_network.shaping import ends

# Otherwise page faults would dominate: glibc returns large blocks to the system and gets them back in every step.
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_TOP_PAD_": "268435456"}
SECONDS = 3600.0


def run(
    module: str,
    plan: dict[str, Any],
    *,
    workers: int = 1,
    results: Path | None = None,
    quiet: bool = False,
    env: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Two hosts with `workers` workers each. The link is unshaped at first; the workers set its rate.

    results: a file for the rows, so that they survive an interrupted run.
    """
    with tempfile.TemporaryDirectory(prefix="slow_network-") as folder, Lab(hosts=2, rate=None) as lab:
        request, results = Path(folder) / "request.json", results or Path(folder) / "results.jsonl"
        results.write_text("")
        request.write_text(json.dumps({"plan": plan, "ends": ends(lab), "results": str(results.absolute())}))
        lab.fleetrun(
            f"benchmarks.slow_network.{module}",
            [str(request)],
            nproc_per_node=workers,
            options=["-m"],
            env=MALLOC | {"OMP_NUM_THREADS": "1"} | dict(env or {}),
            timeout=SECONDS,
            capture=quiet,
        )
        return [json.loads(line) for line in results.read_text().splitlines()]
