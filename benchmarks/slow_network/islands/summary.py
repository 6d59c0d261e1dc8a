"""What was reached, per task and method: scores over the seeds, bytes, and times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean, median

from benchmarks.slow_network.islands.runs import Kept, Outcome, Plan, Run, chosen, seeds
from benchmarks.slow_network.islands.ways import WAYS, Way

FEWER = 400  # times fewer bytes than data parallelism: the goal
SLOWER = 1.1  # times the time without communication: the goal
RATE = "100mbit"  # the rate that the goals are for


@dataclass(frozen=True)
class Cell:
    """One method on one task."""

    task: str
    way: Way
    run: Run  # the chosen one, with the first seed
    outcomes: list[Outcome]  # by seed
    times: Mapping[str, list[float]]  # seconds per step by rate, one per block

    @property
    def tests(self) -> list[float]:
        return [outcome.test for outcome in self.outcomes]

    @property
    def test(self) -> float:
        return mean(self.tests)

    @property
    def loss(self) -> float | None:
        found = [outcome.loss for outcome in self.outcomes if outcome.loss is not None]
        return mean(found) if len(found) == len(self.outcomes) else None

    @property
    def sent(self) -> float:
        """Bytes of the busier host in a whole training."""
        return mean(outcome.sent for outcome in self.outcomes)

    def step(self, rate: str) -> float | None:
        return median(self.times[rate]) if self.times.get(rate) else None


@dataclass(frozen=True)
class Summary:
    task: str
    steps: int
    seeds: int
    cells: list[Cell]

    @property
    def trained(self) -> list[Cell]:
        """Those that have a score: others are only timed."""
        return [cell for cell in self.cells if cell.outcomes]

    def at(self, name: str) -> Cell | None:
        return next((cell for cell in self.cells if cell.way.name == name), None)

    def fewer(self, cell: Cell) -> float | None:
        """How many times fewer bytes than DDP."""
        dense = self.at("ddp")
        return dense.sent / cell.sent if dense and cell.sent else None

    def target(self) -> float | None:
        """The lowest score of dense over the seeds."""
        dense = self.at("ddp")
        return min(dense.tests) if dense else None

    def keeps(self, cell: Cell) -> bool | None:
        """Whether the mean is not below the seeds' spread of dense. None: seeds are missing."""
        dense, target = self.at("ddp"), self.target()
        if dense is None or target is None or min(len(cell.tests), len(dense.tests)) < self.seeds:
            return None
        return cell.test >= target

    def steps_to_target(self, cell: Cell) -> float | None:
        """Steps of the mean curve to the target; None: never."""
        target = self.target()
        if target is None or not cell.outcomes:
            return None
        points = [mean(scores) for scores in zip(*([s for _, s, _ in o.curve] for o in cell.outcomes), strict=True)]
        before: tuple[int, float] | None = None
        for (step, _, _), score in zip(cell.outcomes[0].curve, points, strict=True):
            if score >= target:
                if before is None:
                    return float(step)
                return before[0] + (target - before[1]) / (score - before[1]) * (step - before[0])
            before = (step, score)
        return None

    def slower(self, cell: Cell, rate: str, than: str = "alone") -> float | None:
        """Time per step as a multiple of that without communication: the median of the ratios in each block."""
        other = self.at(than)
        mine, theirs = (c.times.get(rate, []) if c else [] for c in (cell, other))
        ratios = [a / b for a, b in zip(mine, theirs, strict=False)]
        return median(ratios) if ratios else None

    def met(self, cell: Cell) -> list[bool | None]:
        """Score, bytes, time."""
        fewer, slower = self.fewer(cell), self.slower(cell, RATE)
        return [
            self.keeps(cell),
            None if fewer is None else fewer >= FEWER,
            None if slower is None else slower <= SLOWER,
        ]


def summarised(plan: Plan, kept: Kept, task: str) -> Summary:
    cells = []
    for way in WAYS:
        if way.name not in plan.ways:
            continue
        best = (plan.search(task, way.name) or [None])[0] if way.apart else chosen(plan, task, way.name, kept.outcomes)
        if best is None:
            continue
        outcomes = [kept.outcomes[run] for run in seeds(plan, best) if run in kept.outcomes]
        if not outcomes and not way.apart:
            continue
        times: dict[str, list[float]] = {}
        for timing in sorted(kept.timings.values(), key=lambda timing: timing.block):
            if (timing.task, timing.way) == (task, way.name) and timing.rate:
                times.setdefault(timing.rate, []).append(timing.seconds)
        cells.append(Cell(task, way, best, outcomes, times))
    return Summary(task, plan.steps[task], plan.seeds, cells)
