"""What watching the ranks and all that is checked cost in a training step.

A step of 40 ms varies by several percent from one to the next, so one percent of it is hard to see there. The `small`
benchmarks train a model of as many parameters, each tiny, and compare microseconds: what a step costs besides its
arithmetic is the same, and 400 µs are 1 % of 40 ms.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.frame import Run, Sides, benchmark
from benchmarks.overhead import CLASSES, Case, Update, optimizer_of
from benchmarks.overhead import compare as against_ddp
from fleetx import fleet
from fleetx.comm import session, watch
from fleetx.comm.session import current
from fleetx.engine.numbers import Checks

PAGE = "checks.md"
STEP = Case(depth=4, width=256, batch=4, length=64)  # about 40 ms on two cores
SMALL = Case(depth=4, width=16, batch=2, length=4, updates=4)  # as many parameters; little but the overhead is left
BUDGET = 400e-6  # 1 % of 40 ms
OFF = Checks(on_nonfinite="ignore", same_parameters=0)


def step_of(rank: int, checks: Checks, case: Case = STEP) -> Update:
    session.current().checks = checks
    made = case.model(recompute=False)
    model, optimizer = fleet.distribute(made, optimizer_of(made))
    ((x, y),) = case.batches(rank)

    def step() -> None:
        for _ in range(case.updates):
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def compare(run: Run, checks: Checks, case: Case = STEP) -> Sides:
    fleet.init()
    ours, theirs = run.both(lambda: step_of(run.rank, checks, case), lambda: step_of(run.rank, OFF, case))
    return run.compare(ours, theirs, steps=case.updates, torch_threads=torch.get_num_threads())


@benchmark(ours="checks", theirs="none", goal=1.01, ranks=2, rounds=200)
def checks(run: Run) -> Sides:
    """A step with the default checks against one without; both are watched."""
    return compare(run, Checks())


@benchmark(ours="checks", theirs="none", budget=BUDGET, ranks=2, rounds=400)
def checks_small(run: Run) -> Sides:
    """The same with a small model: microseconds a step."""
    return compare(run, Checks(), SMALL)


@benchmark(ours="every gradient", theirs="none", ranks=2, rounds=200)
def every_gradient(run: Run) -> Sides:
    """A step that looks at every gradient against one that looks at none; both are watched."""
    return compare(run, Checks(every_gradient=True))


@benchmark(ours="watched", theirs="not watched", goal=1.01, ranks=2, rounds=200)
def watched(run: Run) -> Sides:
    """A step with the watcher beside each rank against one while it is stopped (SIGSTOP)."""
    return watched_or_not(run, STEP)


@benchmark(ours="watched", theirs="not watched", budget=BUDGET, ranks=2, rounds=400)
def watched_small(run: Run) -> Sides:
    """The same with a small model: microseconds a step."""
    return watched_or_not(run, SMALL)


def watched_or_not(run: Run, case: Case) -> Sides:
    import signal

    fleet.init()
    step = step_of(run.rank, OFF, case)
    found = watch.of(current().here())
    assert found is not None
    pid = found._process.pid

    def beside(stopped: bool) -> Update:
        def timed() -> None:
            os.kill(pid, signal.SIGSTOP if stopped else signal.SIGCONT)
            step()

        return timed

    try:
        return run.compare(beside(False), beside(True), steps=case.updates)
    finally:
        os.kill(pid, signal.SIGCONT)


@benchmark(ours="fleetx", theirs="raw DDP", goal=1.01, ranks=2, rounds=200)
def all_checks(run: Run) -> Sides:
    """A step of about 40 ms with everything that is checked by default, against plain DistributedDataParallel."""
    return against_ddp(STEP, run)


@benchmark(ours="fleetx", theirs="raw DDP", budget=BUDGET, ranks=2, rounds=400)
def all_checks_small(run: Run) -> Sides:
    """The same with a small model: microseconds a step."""
    return against_ddp(SMALL, run)


class Residual(nn.Linear):
    """A chain of plain layers this deep would end in numbers that are nearly zero, which CPUs multiply very slowly."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x).tanh()


class Many(Case):
    """400 small parameters: what is done in Python for each of them would show."""

    def model(self, *, recompute: bool) -> nn.Module:
        torch.manual_seed(0)
        layers = [Residual(self.width, self.width) for _ in range(self.depth)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(self.width * self.length, CLASSES))


MANY = Many(depth=199, width=64, batch=16, length=4)


@benchmark(ours="fleetx", theirs="raw DDP", goal=1.01, ranks=2, rounds=200)
def many_parameters(run: Run) -> Sides:
    """The same with 400 small parameters."""
    return against_ddp(MANY, run)


@benchmark(ours="fleetx", theirs="by hand", ranks=2, rounds=80)
def many_merged(run: Run) -> Sides:
    """400 small parameters under gradient_merge (k = 4), where every gradient is withheld, put back and guarded."""
    return against_ddp(replace(MANY, k=4), run)
