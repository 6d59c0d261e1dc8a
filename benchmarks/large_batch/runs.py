"""The parameters and the outcome of a run, and the file to which finished runs are appended."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


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

    def __str__(self) -> str:
        settings = f"rate {self.rate:<7g} decay {self.decay:<7g} seed {self.seed}"
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

    A run does not record the recipe: after changing it, start with an empty file.
    """

    def __init__(self, path: Path):
        self.path = path
        self.outcomes: dict[Run, Outcome] = {}
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # interrupted while writing
                continue
            self.outcomes[Run(**entry["run"])] = Outcome(**entry["outcome"])

    def add(self, run: Run, outcome: Outcome) -> None:
        self.outcomes[run] = outcome
        with self.path.open("a+") as file:
            torn = file.tell() and not self.path.read_bytes().endswith(b"\n")
            file.write("\n" * bool(torn) + json.dumps({"run": asdict(run), "outcome": asdict(outcome)}) + "\n")
