"""What watching the ranks and all that is checked cost in a training step."""

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
from fleetx.engine.numbers import Checks

STEP = Case(depth=4, width=256, batch=4, length=64)  # about 40 ms on two cores
OFF = Checks(on_nonfinite="ignore", same_parameters=0)


def step_of(rank: int, checks: Checks) -> Update:
    session.current().checks = checks
    made = STEP.model(recompute=False)
    model, optimizer = fleet.distribute(made, optimizer_of(made))
    ((x, y),) = STEP.batches(rank)

    def step() -> None:
        cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare(run: Run, checks: Checks) -> Sides:
    fleet.init()
    ours, theirs = run.both(lambda: step_of(run.rank, checks), lambda: step_of(run.rank, OFF))
    return run.compare(ours, theirs, torch_threads=torch.get_num_threads())


@benchmark(ours="checks", theirs="none", goal=1.01, ranks=2, rounds=200)
def checks(run: Run) -> Sides:
    """A step with the default checks against one without; both are watched."""
    return compare(run, Checks())


@benchmark(ours="every gradient", theirs="none", ranks=2, rounds=200)
def every_gradient(run: Run) -> Sides:
    """A step that looks at every gradient against one that looks at none; both are watched."""
    return compare(run, Checks(every_gradient=True))


@benchmark(ours="watched", theirs="not watched", goal=1.01, ranks=2, rounds=200)
def watched(run: Run) -> Sides:
    """A step with the watcher beside each rank against one while it is stopped (SIGSTOP)."""
    import signal

    fleet.init()
    step = step_of(run.rank, OFF)
    found = watch.of(fleet._here())
    assert found is not None
    pid = found._process.pid

    def beside(stopped: bool) -> Update:
        def timed() -> None:
            os.kill(pid, signal.SIGSTOP if stopped else signal.SIGCONT)
            step()

        return timed

    try:
        return run.compare(beside(False), beside(True))
    finally:
        os.kill(pid, signal.SIGCONT)


@benchmark(ours="fleetx", theirs="raw DDP", goal=1.01, ranks=2, rounds=200)
def all_checks(run: Run) -> Sides:
    """A step of about 40 ms with everything that is checked by default, against plain DistributedDataParallel."""
    return against_ddp(STEP, run)


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
