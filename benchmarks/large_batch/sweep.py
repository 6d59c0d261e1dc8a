"""Which run comes next. The search is the same for every optimizer and batch, so that none is tuned more than another.

With the first seed, try three neighbouring rates. If the best on the held-out images is at an edge, try one more beyond
it, at most `extensions` times. Then run the other seeds at the best rate only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.large_batch.recipe import RECIPES
from benchmarks.large_batch.runs import Outcome, Run


@dataclass(frozen=True)
class Plan:
    optimizers: Sequence[str]
    batches: Sequence[int]
    epochs: int
    seeds: int
    hold_out: int
    steps: Sequence[int] = (-1, 0, 1)  # from the centre
    extensions: int = 1

    @property
    def cells(self) -> list[tuple[str, int]]:
        return [(name, batch) for batch in self.batches for name in self.optimizers]

    def run(self, name: str, batch: int, step: int, seed: int) -> Run:
        return self.at(name, batch, RECIPES[name].rate(batch, step), seed)

    def at(self, name: str, batch: int, rate: float, seed: int) -> Run:
        return Run(name, batch, rate, seed, self.epochs, self.hold_out)

    def tried(self, cell: tuple[str, int], done: Mapping[Run, Outcome]) -> list[Run]:
        """The finished runs of a cell under this plan, by rate and seed."""
        mine = [run for run in done if run == self.at(*cell, run.rate, run.seed)]
        return sorted(mine, key=lambda run: (run.rate, run.seed))


def following(plan: Plan, done: Mapping[Run, Outcome]) -> Run | None:
    """The first run that is not done, or None if the study is complete."""
    return next((run for cell in plan.cells for run in _of(plan, cell, done)), None)


def left(plan: Plan, done: Mapping[Run, Outcome]) -> int:
    """How many runs are left. Extensions are not counted until an edge is the best."""
    count = 0
    for cell in plan.cells:
        rates = [run for run in _first_seed(plan, cell, done) if run not in done]
        count += len(rates) + len([run for run in _other_seeds(plan, cell, done) if run not in done])
    return count


def chosen(plan: Plan, cell: tuple[str, int], done: Mapping[Run, Outcome]) -> Run | None:
    """The best run of the first seed so far."""
    tried = [run for run in plan.tried(cell, done) if run.seed == 0]
    return max(tried, key=lambda run: done[run].chosen_on, default=None)


def _of(plan: Plan, cell: tuple[str, int], done: Mapping[Run, Outcome]) -> Iterator[Run]:
    for runs in (_first_seed, _other_seeds):
        yield from (run for run in runs(plan, cell, done) if run not in done)


def _first_seed(plan: Plan, cell: tuple[str, int], done: Mapping[Run, Outcome]) -> list[Run]:
    steps = sorted(plan.steps)
    for _ in range(plan.extensions):
        runs = [plan.run(*cell, step, 0) for step in steps]
        if any(run not in done for run in runs):
            break
        best = max(range(len(runs)), key=lambda i: done[runs[i]].chosen_on)
        if best == 0:
            steps.insert(0, steps[0] - 1)
        elif best == len(runs) - 1:
            steps.append(steps[-1] + 1)
    return [plan.run(*cell, step, 0) for step in steps]


def _other_seeds(plan: Plan, cell: tuple[str, int], done: Mapping[Run, Outcome]) -> list[Run]:
    """At the best rate so far, or at the centre, which only matters for counting."""
    best = chosen(plan, cell, done)
    rate = best.rate if best else RECIPES[cell[0]].rate(cell[1], 0)
    return [plan.at(*cell, rate, seed) for seed in range(1, plan.seeds)]
