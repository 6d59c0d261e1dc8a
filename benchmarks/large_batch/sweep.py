"""Which run comes next. The search is the same for every optimizer and share, so that none is tuned more than another.

With the first seed and the first decay, try three neighbouring rates. If the best on the held-out samples is at an
edge, try one more beyond it, at most `extensions` times. At the best rate, try the neighbouring decays. At large
shares, where the recipe warms up for longer, try the short warm-up with the best rate and decay. Then run the other
seeds with the best of all these only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.large_batch.recipe import LONG_WARMUP_FROM, RECIPES, SHORT_WARMUP
from benchmarks.large_batch.runs import Outcome, Run
from benchmarks.large_batch.tasks import TASKS

Cell = tuple[str, float]  # an optimizer and a share
Done = Mapping[Run, Outcome]


@dataclass(frozen=True)
class Plan:
    task: str
    optimizers: Sequence[str]
    shares: Sequence[float]
    epochs: int
    seeds: int
    samples: int
    steps: Sequence[int] = (-1, 0, 1)  # of the rate, from the centre
    extensions: int = 1
    decays: Sequence[int] = (-1, 1)  # steps of the decay beside the first one
    short_warmups: bool = True  # try them where the recipe's is long

    @property
    def cells(self) -> list[Cell]:
        return [(name, share) for share in self.shares for name in self.optimizers]

    def at(self, cell: Cell, rate: float, decay: float, seed: int, warmup: float | None = None) -> Run:
        return Run(self.task, *cell, rate, decay, seed, self.epochs, self.samples, warmup)

    def first(self, cell: Cell, step: int) -> Run:
        """With the first decay and the first seed."""
        recipe, task = RECIPES[cell[0]], TASKS[self.task]
        return self.at(cell, recipe.rate(task, cell[1], step), recipe.decay_at(task, 0), 0)

    def tried(self, cell: Cell, done: Done) -> list[Run]:
        """The finished runs of a cell under this plan, by rate, decay and seed."""
        mine = [run for run in done if run == self.at(cell, run.rate, run.decay, run.seed, run.warmup)]
        return sorted(mine, key=lambda run: (run.rate, run.decay, run.warmup or 0, run.seed))


def following(plan: Plan, done: Done) -> Run | None:
    """The first run that is not done, or None if the study is complete."""
    return next((run for cell in plan.cells for run in _of(plan, cell, done)), None)


def left(plan: Plan, done: Done) -> int:
    """How many runs are left. Extensions are not counted until an edge is the best."""
    return sum(run not in done for cell in plan.cells for run in _all(plan, cell, done))


def chosen(plan: Plan, cell: Cell, done: Done) -> Run | None:
    """The best run of the first seed so far."""
    tried = [run for run in plan.tried(cell, done) if run.seed == 0]
    return max(tried, key=lambda run: done[run].chosen_on, default=None)


def _of(plan: Plan, cell: Cell, done: Done) -> Iterator[Run]:
    for runs in (_rates, _decays, _warmups, _other_seeds):
        yield from (run for run in runs(plan, cell, done) if run not in done)


def _all(plan: Plan, cell: Cell, done: Done) -> list[Run]:
    return [run for runs in (_rates, _decays, _warmups, _other_seeds) for run in runs(plan, cell, done)]


def _rates(plan: Plan, cell: Cell, done: Done) -> list[Run]:
    steps = sorted(plan.steps)
    for _ in range(plan.extensions):
        runs = [plan.first(cell, step) for step in steps]
        if any(run not in done for run in runs):
            break
        best = max(range(len(runs)), key=lambda i: done[runs[i]].chosen_on)
        if best == 0:
            steps.insert(0, steps[0] - 1)
        elif best == len(runs) - 1:
            steps.append(steps[-1] + 1)
    return [plan.first(cell, step) for step in steps]


def _decays(plan: Plan, cell: Cell, done: Done) -> list[Run]:
    """At the best rate of the first decay so far, or at the centre, which only matters for counting."""
    recipe, task = RECIPES[cell[0]], TASKS[plan.task]
    rates = [run for run in _rates(plan, cell, done) if run in done]
    best = max(rates, key=lambda run: done[run].chosen_on, default=plan.first(cell, 0))
    return [plan.at(cell, best.rate, recipe.decay_at(task, step), 0) for step in plan.decays]


def _warmups(plan: Plan, cell: Cell, done: Done) -> list[Run]:
    if not plan.short_warmups or cell[1] < LONG_WARMUP_FROM:
        return []
    tried = [run for run in [*_rates(plan, cell, done), *_decays(plan, cell, done)] if run in done]
    best = max(tried, key=lambda run: done[run].chosen_on, default=plan.first(cell, 0))
    return [plan.at(cell, best.rate, best.decay, 0, SHORT_WARMUP)]


def _other_seeds(plan: Plan, cell: Cell, done: Done) -> list[Run]:
    best = chosen(plan, cell, done) or plan.first(cell, 0)
    return [plan.at(cell, best.rate, best.decay, seed, best.warmup) for seed in range(1, plan.seeds)]
