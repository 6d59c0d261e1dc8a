"""What a run is called, what came of it, and a file to which each is added as soon as it is finished."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    optimizer: str
    batch: int
    rate: float
    seed: int
    epochs: int
    hold_out: int  # images that were kept from training, to choose the rate with

    def __str__(self) -> str:
        return f"{self.optimizer:5} batch {self.batch:5} rate {self.rate:<7g} seed {self.seed}"


@dataclass(frozen=True)
class Outcome:
    updates: int
    chosen_on: float  # accuracy on the images that were held out
    test: float
    loss: float | None  # of the last update; None: it was no number any more
    seconds: float


class Kept:
    """The finished runs, in the order in which they ended. A study that is started again goes on after them.

    The recipe is not part of a run's name: after a change to it, begin in an empty folder.
    """

    def __init__(self, path: Path):
        self.path = path
        self.outcomes: dict[Run, Outcome] = {}
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:  # it was stopped while it wrote this one
                continue
            self.outcomes[Run(**entry["run"])] = Outcome(**entry["outcome"])

    def add(self, run: Run, outcome: Outcome) -> None:
        self.outcomes[run] = outcome
        with self.path.open("a+") as file:
            torn = file.tell() and not self.path.read_bytes().endswith(b"\n")
            file.write("\n" * bool(torn) + json.dumps({"run": asdict(run), "outcome": asdict(outcome)}) + "\n")
