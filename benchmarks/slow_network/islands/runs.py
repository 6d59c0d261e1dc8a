"""The file to which finished trainings and timings are appended, and which of them comes next."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.frame import machine
from benchmarks.slow_network.islands.ways import BY_NAME, Settings

SEEDS = 5


@dataclass(frozen=True)
class Run:
    task: str
    way: str
    settings: tuple[tuple[str, float], ...]
    seed: int
    steps: int

    def __str__(self) -> str:
        words = " ".join(f"{key} {value:g}" for key, value in self.settings)
        return f"{self.task:6} {self.way:14} {words}, seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    chosen_on: float  # score on the held-out samples
    test: float
    loss: float | None  # on the test samples; None if the run diverged
    curve: list[tuple[int, float, float | None]]  # step, test score, test loss
    sent: float  # bytes that the busier host sent during the training
    bytes: int  # of the parameters
    seconds: float


@dataclass(frozen=True)
class Timing:
    task: str
    way: str
    rate: str | None
    block: int
    steps: int = 0  # that were timed
    seconds: float = 0.0  # per step, of the slowest rank
    sent: float = 0.0  # per step, of the busier host
    load: float = 0.0  # of the machine before

    @property
    def key(self) -> tuple[str, str, str | None, int]:
        return self.task, self.way, self.rate, self.block


class Kept:
    """The finished runs, in order. After changing a task or a method, start with an empty file."""

    def __init__(self, path: Path):
        self.path = path
        self.outcomes: dict[Run, Outcome] = {}
        self.timings: dict[tuple[str, str, str | None, int], Timing] = {}
        self.made: list[dict[str, Any]] = []
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # interrupted while writing
                continue
            self.made.append(entry["made"])
            if "timing" in entry:
                timing = Timing(**entry["timing"])
                self.timings[timing.key] = timing
            else:
                run = entry["run"]
                found = Run(**run | {"settings": frozen(run["settings"])})
                self.outcomes[found] = Outcome(**entry["outcome"])

    def add(self, run: Run, outcome: Outcome) -> None:
        self.outcomes[run] = outcome
        self._append({"run": asdict(run) | {"settings": dict(run.settings)}, "outcome": asdict(outcome)})

    def time(self, timing: Timing) -> None:
        self.timings[timing.key] = timing
        self._append({"timing": asdict(timing)})

    def _append(self, entry: dict[str, Any]) -> None:
        self.made.append(_place() | {"date": datetime.now(UTC).isoformat(timespec="seconds")})
        with self.path.open("a+") as file:
            torn = file.tell() and not self.path.read_bytes().endswith(b"\n")
            file.write("\n" * bool(torn) + json.dumps(entry | {"made": self.made[-1]}) + "\n")


def frozen(settings: Settings) -> tuple[tuple[str, float], ...]:
    return tuple(sorted(settings.items()))


@cache
def _place() -> dict[str, Any]:
    place = machine.machine()
    kept = {key: place[key] for key in ("cpu", "cores", "memory_gib", "system", "python", "torch")}
    return kept | {"commit": machine.commit()}  # with which this process began


@dataclass(frozen=True)
class Plan:
    ways: Sequence[str]
    steps: Mapping[str, int]  # by task
    seeds: int = SEEDS
    settings_of: Mapping[str, str] = field(default_factory=dict)  # tasks that take over the settings of another one
    only: Mapping[str, Sequence[str]] = field(default_factory=dict)  # methods of a task, if not all of them

    def search(self, task: str, way: str) -> list[Run]:
        if task in self.settings_of:
            return []
        return [Run(task, way, frozen(settings), 0, self.steps[task]) for settings in BY_NAME[way].candidates]

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Tasks and methods, in the order in which they are trained."""
        for later in (False, True):
            for way in self.ways:
                for task in self.steps:
                    here = way in self.only.get(task, self.ways) and not BY_NAME[way].apart
                    if here and (task in self.settings_of) == later:
                        yield task, way


Done = Mapping[Run, Outcome]


def chosen(plan: Plan, task: str, way: str, done: Done) -> Run | None:
    """The setting with the best score on held-out samples, once all were tried."""
    if way not in plan.only.get(task, plan.ways):
        return None
    if task in plan.settings_of:
        like = chosen(plan, plan.settings_of[task], way, done)
        return like and replace(like, task=task, steps=plan.steps[task])
    tried = plan.search(task, way)
    return max(tried, key=lambda run: done[run].chosen_on) if all(run in done for run in tried) else None


def remaining(plan: Plan, done: Done) -> Iterator[Run]:
    """For each method and task, the search and then the other seeds of what it chose."""
    for task, way in plan.pairs():
        yield from (run for run in plan.search(task, way) if run not in done)
        best = chosen(plan, task, way, done)
        if best is not None:
            yield from (run for run in seeds(plan, best) if run not in done)


def seeds(plan: Plan, best: Run) -> list[Run]:
    return [Run(best.task, best.way, best.settings, seed, best.steps) for seed in range(plan.seeds)]


def left(plan: Plan, done: Done) -> int:
    known = sum(1 for _ in remaining(plan, done))
    unknown = [task for task, way in plan.pairs() if chosen(plan, task, way, done) is None]
    return known + sum(plan.seeds - (task not in plan.settings_of) for task in unknown)
