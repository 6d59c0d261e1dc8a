"""The command line of this study: one call per part, resumed where the last one stopped."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from benchmarks.frame import CannotRunError
from benchmarks.large_batch import data, text
from benchmarks.slow_network import study
from benchmarks.slow_network.islands.runs import Plan
from benchmarks.slow_network.islands.tasks import TASKS
from benchmarks.slow_network.islands.times import BLOCKS, RATES
from benchmarks.slow_network.islands.ways import WAYS

KEPT = Path(__file__).parents[3] / "docs" / "results" / "islands_runs.jsonl"  # committed, to continue anywhere
# On a busy machine a rank may not run for seconds, which is no reason to give it up; and only training sends bytes.
PATIENT = {"FLEETX_WATCH": "0"}
PLAN = Plan(
    [way.name for way in WAYS],
    {name: task.steps for name, task in TASKS.items()},
    settings_of={"long": "text"},
    only={"long": ["ddp", "island64_four"]},  # a training takes a minute
)


def measure(plan: Plan, runs: Path, minutes: float, *, times: bool, folder: Path = data.FOLDER) -> None:
    """Train, or time steps, for at most so many minutes."""
    if reason := data.missing(folder) or text.missing():
        raise CannotRunError(reason)
    here = [way.name for way in WAYS if way.name in plan.ways and not way.missing()]
    for way in WAYS:
        if way.name in plan.ways and (reason := way.missing()):
            print(f"{way.title} is left out: {reason}", flush=True)
    asked = {
        "plan": asdict(plan) | {"ways": here},
        "data": str(folder.absolute()),
        "runs": str(runs.absolute()),
        "minutes": minutes,
        "times": times,
        "blocks": BLOCKS,
        "rates": RATES,
    }
    study.run("islands.worker", asked, workers=2, env={} if times else PATIENT)
