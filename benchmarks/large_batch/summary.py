"""One score per optimizer and share, and the largest share that keeps the baseline's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import mean

from benchmarks.large_batch import recipe
from benchmarks.large_batch.runs import Run
from benchmarks.large_batch.sweep import Cell as Key
from benchmarks.large_batch.sweep import Done, Plan, chosen
from benchmarks.large_batch.tasks import TASKS, Task

BASELINE = {"images": "sgd", "text": "adamw"}  # at the smallest share: what is usual for the task


@dataclass(frozen=True)
class Cell:
    """An optimizer at a share."""

    optimizer: str
    share: float
    updates: int
    rate: float  # the chosen one
    decay: float
    warmup: float  # fraction of all updates
    tried: list[tuple[float, float, float, float]]  # rate, decay, warm-up, held-out score; of the first seed
    tests: list[float]  # by seed, with the chosen settings

    @property
    def test(self) -> float:
        return mean(self.tests)

    @property
    def at_edge(self) -> bool:
        """Whether the best rate is the smallest or largest tried, so that a better one may lie beyond."""
        rates = {rate for rate, *_ in self.tried}
        return len(rates) > 1 and self.rate in (min(rates), max(rates))


@dataclass(frozen=True)
class Summary:
    task: Task
    cells: list[Cell]
    baseline: Cell | None

    def of(self, optimizer: str) -> list[Cell]:
        return sorted((cell for cell in self.cells if cell.optimizer == optimizer), key=lambda cell: cell.share)

    def at(self, optimizer: str, share: float) -> Cell | None:
        return next((cell for cell in self.of(optimizer) if cell.share == share), None)

    def keeps(self, cell: Cell) -> bool:
        """Is the mean at most the tolerance below the baseline?"""
        return self.baseline is not None and cell.test >= self.baseline.test - self.task.tolerance - 1e-9

    def largest(self, optimizer: str) -> Cell | None:
        kept = [cell for cell in self.of(optimizer) if self.keeps(cell)]
        return kept[-1] if kept else None


def summarised(plan: Plan, done: Done) -> Summary:
    cells = [cell for key in plan.cells if (cell := _cell(plan, key, done)) is not None]
    wanted = (BASELINE[plan.task], min(plan.shares))
    baseline = [cell for cell in cells if (cell.optimizer, cell.share) == wanted]
    return Summary(TASKS[plan.task], cells, baseline[0] if baseline else None)


def _cell(plan: Plan, key: Key, done: Done) -> Cell | None:
    best = chosen(plan, key, done)
    if best is None:
        return None
    runs = plan.tried(key, done)
    tried = [(run.rate, run.decay, _warmup(run), done[run].chosen_on) for run in runs if run.seed == 0]
    tests = [done[run].test for run in runs if replace(run, seed=0) == best]
    return Cell(*key, done[best].updates, best.rate, best.decay, _warmup(best), tried, tests)


def _warmup(run: Run) -> float:
    return recipe.warmup(run.share) if run.warmup is None else run.warmup
