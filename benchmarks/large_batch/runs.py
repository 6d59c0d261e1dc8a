"""The parameters and the outcome of a run, and the file to which finished runs are appended."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.frame import machine


@dataclass(frozen=True)
class Run:
    task: str
    optimizer: str
    share: float  # of the data, per update
    rate: float
    decay: float
    seed: int
    epochs: int
    samples: int  # to train with
    warmup: float | None = None  # fraction of all updates; None: the recipe's for this share

    def __str__(self) -> str:
        settings = f"rate {self.rate:<7g} decay {self.decay:<7g} seed {self.seed}"
        if self.warmup is not None:
            settings += f" warmup {self.warmup:g}"
        return f"{self.task:6} {self.optimizer:5} share {self.share:6.2%} {settings}"


@dataclass(frozen=True)
class Outcome:
    updates: int
    chosen_on: float  # score on the held-out samples
    test: float
    loss: float | None  # of the last update; None if the run diverged
    seconds: float


class Kept:
    """The finished runs, in order. A study that is started again resumes after them.

    A run records when and where it was made, because a study may move from machine to machine. It does not record the
    recipe: after changing it, start with an empty file.
    """

    def __init__(self, path: Path):
        self.path = path
        self.outcomes: dict[Run, Outcome] = {}
        self.made: dict[Run, dict[str, Any]] = {}
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # interrupted while writing
                continue
            run = Run(**entry["run"])
            self.outcomes[run], self.made[run] = Outcome(**entry["outcome"]), entry.get("made", {})

    def add(self, run: Run, outcome: Outcome) -> None:
        self.outcomes[run], self.made[run] = outcome, _here()
        entry = {"run": asdict(run), "outcome": asdict(outcome), "made": self.made[run]}
        with self.path.open("a+") as file:
            torn = file.tell() and not self.path.read_bytes().endswith(b"\n")
            file.write("\n" * bool(torn) + json.dumps(entry) + "\n")


def _here() -> dict[str, Any]:
    """Without loads: workers with one thread each compute the same bits on a busy machine."""
    place = machine.machine()
    kept = {key: place[key] for key in ("cpu", "cores", "memory_gib", "system", "python", "torch")}
    return kept | {"commit": machine.commit(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
