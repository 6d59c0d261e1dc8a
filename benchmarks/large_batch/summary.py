"""One accuracy per optimizer and batch, and the largest batch that keeps the baseline's accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean

from benchmarks.large_batch.runs import Outcome, Run
from benchmarks.large_batch.sweep import Plan, chosen

TOLERANCE = 0.003
BASELINE = "sgd"  # at the smallest batch


@dataclass(frozen=True)
class Cell:
    """An optimizer at a batch."""

    optimizer: str
    batch: int
    updates: int
    rate: float  # the chosen one
    tried: dict[float, float]  # the accuracy on the held-out images by rate
    tests: list[float]  # by seed, at the chosen rate

    @property
    def test(self) -> float:
        return mean(self.tests)

    @property
    def at_edge(self) -> bool:
        """Whether the best rate is the smallest or largest tried, so that a better one may lie beyond."""
        return len(self.tried) > 1 and self.rate in (min(self.tried), max(self.tried))


@dataclass(frozen=True)
class Summary:
    cells: list[Cell]
    baseline: Cell | None

    def of(self, optimizer: str) -> list[Cell]:
        return sorted((cell for cell in self.cells if cell.optimizer == optimizer), key=lambda cell: cell.batch)

    def at(self, optimizer: str, batch: int) -> Cell | None:
        return next((cell for cell in self.of(optimizer) if cell.batch == batch), None)

    def largest(self, optimizer: str) -> Cell | None:
        """The cell with the largest batch whose mean is at most the tolerance below the baseline."""
        if self.baseline is None:
            return None
        kept = [cell for cell in self.of(optimizer) if cell.test >= self.baseline.test - TOLERANCE - 1e-9]
        return kept[-1] if kept else None


def summarised(plan: Plan, done: Mapping[Run, Outcome]) -> Summary:
    cells = [cell for key in plan.cells if (cell := _cell(plan, key, done)) is not None]
    smallest = min(plan.batches)
    baseline = [cell for cell in cells if (cell.optimizer, cell.batch) == (BASELINE, smallest)]
    return Summary(cells, baseline[0] if baseline else None)


def _cell(plan: Plan, key: tuple[str, int], done: Mapping[Run, Outcome]) -> Cell | None:
    best = chosen(plan, key, done)
    if best is None:
        return None
    runs = plan.tried(key, done)
    tried = {run.rate: done[run].chosen_on for run in runs if run.seed == 0}
    return Cell(*key, done[best].updates, best.rate, tried, [done[run].test for run in runs if run.rate == best.rate])
