"""One training on the unshaped link. All workers call it with the same arguments and get the same outcome.

The parameters are copied every `every` steps and evaluated after the last one. If the ranks differ, their mean is.
"""

from __future__ import annotations

import gc
import math
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import vector_to_parameters
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.large_batch.data import Split
from benchmarks.netlab import counters
from benchmarks.slow_network.islands.runs import Outcome, Run
from benchmarks.slow_network.islands.tasks import BATCH, TASKS, Samples, Task, order
from benchmarks.slow_network.islands.ways import BY_NAME
from benchmarks.slow_network.methods import Loop, flat
from benchmarks.slow_network.task import slowest

LISTEN = 3.0  # seconds
WORST = -20.0  # score of a training that diverged: JSON has neither nan nor inf


class Training:
    """A model, its loop and its samples."""

    def __init__(self, run: Run, data: Split):
        self.task = TASKS[run.task]
        way, settings = BY_NAME[run.way], dict(run.settings)
        torch.manual_seed(run.seed)
        self.model = self.task.model()
        optimizer = self.task.optimizer(self.model, settings["rate"] * self.task.rate)
        self.loop: Loop = way.make(settings, run.task)(self.model, optimizer)
        self._schedule = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / run.steps))
        world, rank = dist.get_world_size(), dist.get_rank()
        wanted = {"steps": run.steps, "workers": world, "batch": self.task.batch, "seed": run.seed}
        self._mine = order(len(data.train), **wanted)[:, rank]
        self._train, self._done = data.train, 0

    def step(self) -> None:
        some = self._train[self._mine[self._done]]
        self.loop.step(lambda model: self.task.loss(model, some))
        self._schedule.step()
        self._done += 1


def chatter() -> float:
    """Bytes per second that a host sends while nothing is trained: fleetrun's nodes watch each other.

    On a busy machine a training of seconds takes minutes, and this would be more than what it sends.
    """
    dist.barrier()
    before = counters.here()
    time.sleep(LISTEN)
    heard = float((counters.here() - before).sent)
    dist.barrier()
    return heard / LISTEN


def trained(run: Run, data: Split, *, background: float = 0.0) -> Outcome:
    """background: bytes per second that are not counted."""
    began = time.monotonic()
    training = Training(run, data)
    task = training.task
    snapshots: list[tuple[int, Tensor]] = []
    dist.barrier()
    before, trained_from = counters.here(), time.monotonic()
    for step in range(1, run.steps):
        training.step()
        if step % task.every == 1:
            snapshots.append((step, flat(training.model)))
    training.step()
    training.loop.end()
    dist.barrier()
    sent = (counters.here() - before).sent - background * (time.monotonic() - trained_from)
    dist.barrier()  # until all have read it, nothing more is sent
    snapshots.append((run.steps, flat(training.model)))
    together([copy for _, copy in snapshots], alone=BY_NAME[run.way].alone)
    size = 4 * snapshots[0][1].numel()
    del training
    gc.collect()
    model = task.model()
    curve = [(step, *judged(task, model, copy, data.test)) for step, copy in snapshots]
    held_out, _ = judged(task, model, snapshots[-1][1], data.choose)
    return Outcome(held_out, curve[-1][1], curve[-1][2], curve, slowest([sent])[0], size, time.monotonic() - began)


def together(copies: list[Tensor], *, alone: bool) -> None:
    """The mean over the ranks; without communication, what the first rank has."""
    for copy in copies:
        if alone:
            dist.broadcast(copy, 0)
        else:
            dist.all_reduce(copy.div_(dist.get_world_size()))


@torch.no_grad()
def judged(task: Task, model: nn.Module, parameters: Tensor, samples: Samples) -> tuple[float, float | None]:
    """Score and loss per target; each worker evaluates its share."""
    vector_to_parameters(parameters, model.parameters())
    share = samples[slice(dist.get_rank(), None, dist.get_world_size())]
    found = torch.zeros(2, dtype=torch.float64)
    for start in range(0, len(share), BATCH):
        part = share[slice(start, start + BATCH)]
        logits = model(part.inputs)
        found[0] += task.score(logits, part.targets)
        found[1] += cross_entropy(logits.flatten(0, -2), part.targets.flatten(), reduction="sum")
    dist.all_reduce(found)
    score, loss = (found / samples.targets.numel()).tolist()
    return score if score > WORST else WORST, loss if math.isfinite(loss) else None
