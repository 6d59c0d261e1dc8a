"""How large a batch fits: predicted, then tried in a process that may die."""

from __future__ import annotations

import copy
import json
import os
import signal
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fleetx.base.sizes import words
from fleetx.base.trees import map_tensors, tensors_of
from fleetx.comm.roles import Place
from fleetx.comm.world import World
from fleetx.engine.engine import Engine
from fleetx.errors import StrategyError, UsageError
from fleetx.measure.fake_step import Arm, Forward, Step, estimate, loss
from fleetx.measure.tracker import Tracker
from fleetx.strategy.compose import compose

Peak = Callable[[int], int]  # of a batch of so many
MOST = 1 << 20  # samples: nobody asks for more


@dataclass(frozen=True)
class Batch:
    """`micro` samples at a time; `merge` such steps in each of `ranks` processes make the global batch."""

    micro: int
    merge: int
    ranks: int
    memory: int  # bytes that were allowed
    predicted: int  # the peak
    tried: int | None  # the peak of a real step in another process; None: it was not tried

    @property
    def total(self) -> int:
        return self.micro * self.merge * self.ranks

    def __str__(self) -> str:
        tried = f", {words(self.tried)} when tried" if self.tried is not None else ""
        return (
            f"{self.micro} samples at a time: {words(self.predicted)} of {words(self.memory)}{tried}. "
            f"{self.total} = {self.micro} x {self.merge} merged steps x {self.ranks} ranks"
        )


def largest(peak: Peak, memory: int, most: int = MOST) -> int:
    """The largest batch whose peak is within `memory`; 0 where one sample is too many. Few predictions: peaks grow
    nearly in proportion."""
    known: dict[int, int] = {}

    def fits(n: int) -> bool:
        if n not in known:
            known[n] = peak(n)
        return known[n] <= memory

    if not fits(1):
        return 0
    good, bad = 1, most + 1
    guess = 2
    while bad - good > 1:
        guess = min(max(guess, good + 1), bad - 1)
        if fits(guess):
            good = guess
        else:
            bad = guess
        low, high = (min(known), max(known)) if len(known) > 1 else (1, 2)
        slope = (known[high] - known[low]) / max(high - low, 1) if high in known and low in known else 0
        guess = int(good + (memory - known[good]) / slope) if slope > 0 else 2 * good
        guess = guess if good < guess < bad else (good + 1 if guess <= good else bad - 1)
    return good


def solve(micro: int, global_batch: int | None, ranks: int) -> tuple[int, int]:
    """micro and merge such that global = micro x merge x ranks, micro being as large as it may."""
    if ranks < 1 or (global_batch is not None and global_batch < 1):
        raise UsageError(f"a global batch of {global_batch} on {ranks} ranks: both must be at least 1")
    if global_batch is None:
        return micro, 1
    if global_batch % ranks:
        near = [n for n in (global_batch // ranks * ranks, (global_batch // ranks + 1) * ranks) if n]
        raise UsageError(
            f"a global batch of {global_batch} cannot be shared by {ranks} ranks: {' or '.join(map(str, near))} can"
        )
    share = global_batch // ranks
    best = next(n for n in range(min(micro, share), 0, -1) if share % n == 0)
    return best, share // best


def tried(step: Step, arm: Arm | None) -> int:
    """The peak of two real steps, in a process of its own. Raises StrategyError where it dies or fails."""
    if step.device.type == "cuda":
        return _tried_here(step, arm)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # one thread: OpenMP's others do not survive a fork
        torch.set_num_threads(1)
        try:
            answer: dict[str, Any] = {"peak": _run(step, arm)}
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        with os.fdopen(write, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if not text:
        by = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"code {status}"
        raise StrategyError(f"the trial of a batch of {step.batch} died by {by}: there is less memory than was said")
    answer = json.loads(text)
    if "error" in answer:
        raise StrategyError(f"the trial of a batch of {step.batch} failed: {answer['error']}")
    return int(answer["peak"])


def _tried_here(step: Step, arm: Arm | None) -> int:
    """An accelerator that is full raises an error, and nothing dies. A copy is tried: the model stays as it is."""
    model, optimizer = twins(step.model, step.optimizer)
    step = replace(step, model=model, optimizer=optimizer)
    torch.cuda.reset_peak_memory_stats(step.device)
    try:
        _run(step, arm)
    except torch.cuda.OutOfMemoryError as error:
        raise StrategyError(f"the trial of a batch of {step.batch} ran out of memory: {error}") from None
    return torch.cuda.max_memory_allocated(step.device)


def twins(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Copies, the optimizer's with nothing gathered."""
    made = copy.deepcopy(model)
    of = dict(zip(model.parameters(), made.parameters(), strict=True))
    other = copy.copy(optimizer)
    groups = [group | {"params": [of[p] for p in group["params"]]} for group in optimizer.param_groups]
    other.__setstate__({"defaults": optimizer.defaults, "state": defaultdict(dict), "param_groups": groups})
    return made, other


def _run(step: Step, arm: Arm | None) -> int:
    args, kwargs, targets = map_tensors(partial(_repeated, step), (step.args, step.kwargs, step.targets))
    engine = Engine(compose(step.parts), step.model, step.optimizer, World(Place(), step.device))
    forward: Forward = arm(engine.model, engine.forward_context) if arm is not None else nullcontext
    with Tracker() as tracker:
        for t in (*step.model.parameters(), *step.model.buffers(), *tensors_of((args, kwargs, targets))):
            tracker.see(t)
        for _ in range(2):
            with forward():
                out = step.model(*args, **kwargs)
            loss(step, out, targets).backward()
            step.optimizer.step()
            step.optimizer.zero_grad()
            del out
    return tracker.peak + step.beside


def _repeated(step: Step, t: torch.Tensor) -> torch.Tensor:
    if step.batch is None or not t.dim() or len(t) != step.samples:
        return t
    return t[torch.arange(step.batch, device=t.device) % len(t)]


def answer(
    step: Step, memory: int, arm: Callable[[Step], Arm | None], *, global_batch: int | None, ranks: int, trial: bool
) -> Batch:
    """`arm` makes the segments for a step of a given batch."""

    def peak(n: int) -> int:
        one = replace(step, batch=n)
        return estimate(one, arm(one)).peak

    def first(n: int) -> int:
        """Batch norm does not take a single sample."""
        try:
            return peak(n)
        except ValueError:
            if n > 1:
                raise
            return peak(2)

    micro = largest(first, memory)
    if not micro:
        raise StrategyError(
            f"one sample takes {words(first(1))}, and {words(memory)} are allowed. Recompute with "
            "memory_budget='min', sharding, or an optimizer that gathers less would help"
        )
    while True:
        micro, merge = solve(micro, global_batch, ranks)
        chosen = replace(step, batch=micro)
        found = tried(chosen, arm(chosen)) if trial else None
        if found is None or found <= memory or micro == 1:
            break
        micro = min(micro - 1, int(micro * memory / found))
    if found is not None and found > memory:
        raise StrategyError(f"one sample took {words(found)} when tried, and {words(memory)} are allowed")
    return Batch(micro, merge, ranks, memory, first(micro), found)
