"""What `fleet.record` costs in a training step."""

from __future__ import annotations

import tempfile

import torch
from torch.nn.functional import cross_entropy

from benchmarks.frame import Run, Sides, benchmark
from benchmarks.overhead import Case, Update, optimizer_of
from fleetx import fleet
from fleetx.comm import session

PAGE = "checks.md"
STEP = Case(depth=4, width=256, batch=4, length=64)  # about 40 ms on two cores
SMALL = Case(depth=4, width=16, batch=2, length=4, updates=4)  # as many parameters; little but the overhead is left


def step_of(case: Case, rank: int) -> Update:
    made = case.model(recompute=False)
    model, optimizer = fleet.distribute(made, optimizer_of(made))
    ((x, y),) = case.batches(rank)

    def step() -> None:
        for _ in range(case.updates):
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def compare(run: Run, case: Case) -> Sides:
    """Two trainings of one process, of which one is recorded: files, the norm of the gradient, traces and all."""
    fleet.init()
    plain = step_of(case, run.rank)
    with tempfile.TemporaryDirectory() as folder:
        recorder = fleet.record(folder)
        recorded = step_of(case, run.rank)

        def ours() -> None:
            session.current().recorder = recorder
            recorded()

        def theirs() -> None:
            session.current().recorder = None
            plain()

        try:
            return run.compare(ours, theirs, steps=case.updates, torch_threads=torch.get_num_threads())
        finally:
            session.current().recorder = recorder
            session.current().stop_recording()


@benchmark(ours="recorded", theirs="not recorded", goal=1.01, ranks=2, rounds=200)
def step(run: Run) -> Sides:
    """A step of about 40 ms with fleet.record against one without."""
    return compare(run, STEP)


@benchmark(ours="recorded", theirs="not recorded", budget=400e-6, ranks=2, rounds=400)
def small(run: Run) -> Sides:
    """The same with a model of as many parameters, each tiny: microseconds a step; 400 are 1 % of 40 ms."""
    return compare(run, SMALL)
