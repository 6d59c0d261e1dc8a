"""One run. All workers call it with the same arguments and get the same outcome."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.large_batch.data import Split
from benchmarks.large_batch.recipe import RECIPES, warmup
from benchmarks.large_batch.runs import Outcome, Run
from benchmarks.large_batch.tasks import TASKS, Task
from fleetx import fleet
from fleetx.errors import NumbersError
from fleetx.optim import schedule

EVAL_BATCH = 1000


def train(run: Run, data: Split) -> Outcome:
    began = time.monotonic()
    recipe, task = RECIPES[run.optimizer], TASKS[run.task]
    torch.manual_seed(run.seed)
    model = task.model()
    optimizer = recipe.make(model, run.rate, run.decay)
    strategy = recipe.strategy(task, run.share, model, run.decay)
    model, optimizer = fleet.distribute(model, optimizer, strategy)
    order = stream(len(data.train), epochs=run.epochs, seed=run.seed)
    batch = task.batch(run.share)
    updates = len(order) // batch  # a batch may span epochs; the last incomplete one is dropped
    if not updates:
        raise ValueError(f"{len(order)} samples in {run.epochs} epochs are less than one batch of {batch}")
    scheduler = schedule.large_batch(
        optimizer, updates=updates, warmup=warmup(run.share) if run.warmup is None else run.warmup, by="updates"
    )

    # Runs differ in the batch only: the order of the samples is the same.
    micro = batch // task.merged(run.share) // fleet.worker_num()
    mine = order[: updates * batch].view(-1, fleet.worker_num(), micro)[:, fleet.worker_index()]
    loss = torch.tensor(float("inf"))
    try:
        for step, which in enumerate(mine):
            loss = task.loss(model, data.train[which])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if step % 256 == 255 and diverged(model):
                break
    except NumbersError:  # the rate is too large, and this is its result
        loss = torch.tensor(float("nan"))
    last = summed(loss.detach()) / fleet.worker_num()
    return Outcome(
        updates=updates,
        chosen_on=score(task, model, data.choose),
        test=score(task, model, data.test),
        loss=last.item() if last.isfinite() and not diverged(model) else None,
        seconds=time.monotonic() - began,
    )


def stream(samples: int, *, epochs: int, seed: int) -> Tensor:
    """The order of the samples over all epochs, which depends only on the seed."""
    generators = (torch.Generator().manual_seed(1_000_003 * seed + epoch) for epoch in range(epochs))
    return torch.cat([torch.randperm(samples, generator=g) for g in generators])


def diverged(model: nn.Module) -> bool:
    """Whether training has diverged. All workers have the same parameters, so all of them stop together."""
    return not all(p.isfinite().all() for p in model.parameters())


@torch.no_grad()
def score(task: Task, model: nn.Module, samples: Any) -> float:
    """Each worker evaluates its share. A model that diverged gets the score of knowing nothing, or less."""
    model.eval()
    share = samples[slice(fleet.worker_index(), None, fleet.worker_num())]
    total = torch.zeros(2, dtype=torch.float64)
    for start in range(0, len(share), EVAL_BATCH):
        total += task.score(model, share[slice(start, start + EVAL_BATCH)])
    model.train()
    found = float(summed(total)[0] / total[1])
    return found if found > -20 else -20.0  # nan, too: JSON has neither nan nor inf


def summed(value: Tensor) -> Tensor:
    if fleet.worker_num() > 1:
        dist.all_reduce(value)
    return value
