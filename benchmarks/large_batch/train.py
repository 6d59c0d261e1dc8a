"""One run. All workers call it with the same arguments and get the same outcome."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.large_batch.data import Images, Split
from benchmarks.large_batch.model import ResNet
from benchmarks.large_batch.recipe import MICRO, RECIPES, SMOOTHING, warmup
from benchmarks.large_batch.runs import Outcome, Run
from fleetx import fleet
from fleetx.optim import schedule

EVAL_BATCH = 1000


def train(run: Run, data: Split) -> Outcome:
    began = time.monotonic()
    recipe = RECIPES[run.optimizer]
    torch.manual_seed(run.seed)
    model = ResNet().to(memory_format=torch.channels_last)
    optimizer = recipe.make(model, run.rate)
    model, optimizer = fleet.distribute(model, optimizer, recipe.strategy(run.batch))
    order = stream(len(data.train), epochs=run.epochs, seed=run.seed)
    updates = len(order) // run.batch  # a batch may span epochs; the last incomplete one is dropped
    if not updates:
        raise ValueError(f"{len(order)} samples in {run.epochs} epochs are less than one batch of {run.batch}")
    scheduler = schedule.large_batch(optimizer, updates=updates, warmup=warmup(run.batch), by="updates")

    # Runs differ in the batch only: the order of the samples is the same.
    mine = order[: updates * run.batch].view(-1, fleet.worker_num(), MICRO)[:, fleet.worker_index()]
    loss = torch.tensor(float("inf"))
    for step, which in enumerate(mine):
        batch = data.train[which]
        loss = cross_entropy(model(batch.normalised()), batch.labels, label_smoothing=SMOOTHING)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 256 == 255 and diverged(model):
            break
    last = summed(loss.detach()) / fleet.worker_num()
    return Outcome(
        updates=updates,
        chosen_on=accuracy(model, data.choose),
        test=accuracy(model, data.test),
        loss=last.item() if last.isfinite() and not diverged(model) else None,
        seconds=time.monotonic() - began,
    )


def stream(images: int, *, epochs: int, seed: int) -> Tensor:
    """The order of the images over all epochs, which depends only on the seed."""
    generators = (torch.Generator().manual_seed(1_000_003 * seed + epoch) for epoch in range(epochs))
    return torch.cat([torch.randperm(images, generator=g) for g in generators])


def diverged(model: nn.Module) -> bool:
    """Whether training has diverged. All workers have the same parameters, so all of them stop together."""
    return not all(p.isfinite().all() for p in model.parameters())


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> float:
    """Each worker evaluates its share."""
    model.eval()
    share = images[slice(fleet.worker_index(), None, fleet.worker_num())]
    right = torch.zeros(())
    for start in range(0, len(share), EVAL_BATCH):
        some = share[slice(start, start + EVAL_BATCH)]
        right += (model(some.normalised()).argmax(1) == some.labels).sum()
    model.train()
    return int(summed(right)) / len(images)


def summed(value: Tensor) -> Tensor:
    if fleet.worker_num() > 1:
        dist.all_reduce(value)
    return value
