"""One run. Every worker calls it with the same arguments and gets the same outcome."""

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

GLANCE = 1000  # images at once where nothing is learned


def train(run: Run, data: Split) -> Outcome:
    began = time.monotonic()
    recipe = RECIPES[run.optimizer]
    torch.manual_seed(run.seed)
    model = ResNet().to(memory_format=torch.channels_last)
    optimizer = recipe.make(model, run.rate)
    model, optimizer = fleet.distribute(model, optimizer, recipe.strategy(run.batch))
    order = stream(len(data.train), epochs=run.epochs, seed=run.seed)
    updates = len(order) // run.batch  # windows run across the ends of epochs; what does not fill the last is left out
    if not updates:
        raise ValueError(f"{len(order)} samples in {run.epochs} epochs do not fill one batch of {run.batch}")
    scheduler = schedule.large_batch(optimizer, updates=updates, warmup=warmup(run.batch), by="updates")

    # The batch is the only difference between runs: the samples come in the same order for all of them.
    mine = order[: updates * run.batch].view(-1, fleet.worker_num(), MICRO)[:, fleet.worker_index()]
    loss = torch.tensor(float("inf"))
    for step, which in enumerate(mine):
        batch = data.train[which]
        loss = cross_entropy(model(batch.normalised()), batch.labels, label_smoothing=SMOOTHING)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % 256 == 255 and lost(model):
            break
    last = summed(loss.detach()) / fleet.worker_num()
    return Outcome(
        updates=updates,
        chosen_on=accuracy(model, data.choose),
        test=accuracy(model, data.test),
        loss=last.item() if last.isfinite() and not lost(model) else None,
        seconds=time.monotonic() - began,
    )


def stream(images: int, *, epochs: int, seed: int) -> Tensor:
    """Which image comes when, over all epochs: by seed and epoch alone."""
    generators = (torch.Generator().manual_seed(1_000_003 * seed + epoch) for epoch in range(epochs))
    return torch.cat([torch.randperm(images, generator=g) for g in generators])


def lost(model: nn.Module) -> bool:
    """No more numbers in it, on any worker: they all have the same parameters, so that all of them leave together."""
    return not all(p.isfinite().all() for p in model.parameters())


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> float:
    """Each worker looks at its share."""
    model.eval()
    share = images[slice(fleet.worker_index(), None, fleet.worker_num())]
    right = torch.zeros(())
    for start in range(0, len(share), GLANCE):
        some = share[slice(start, start + GLANCE)]
        right += (model(some.normalised()).argmax(1) == some.labels).sum()
    model.train()
    return int(summed(right)) / len(images)


def summed(value: Tensor) -> Tensor:
    if fleet.worker_num() > 1:
        dist.all_reduce(value)
    return value
