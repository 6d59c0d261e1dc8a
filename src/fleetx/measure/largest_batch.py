"""Finds the largest batch that fits into memory: predicted first, then tried in a process that may die."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from fleetx.base.sizes import format_bytes
from fleetx.base.trees import map_tensors, tensors_of
from fleetx.comm.roles import ProcessInfo
from fleetx.comm.world import World
from fleetx.engine.engine import Engine
from fleetx.errors import StrategyError, UsageError
from fleetx.measure.child import forked
from fleetx.measure.fake_step import AroundForward, InstallSegments, TrainingStep, copy_optimizer, estimate
from fleetx.measure.tracker import Tracker
from fleetx.strategy.compose import compose

LIMIT = 1 << 20  # samples: the search stops here
TRIAL_SECONDS = 3600  # a trial that takes longer is assumed to hang


@dataclass(frozen=True)
class LargestBatch:
    """`micro` samples at a time; `merge` such steps on each of `ranks` ranks make one global batch."""

    micro: int
    merge: int
    ranks: int
    memory: int  # bytes allowed
    predicted: int  # peak bytes
    tried: int | None  # peak bytes of a real step in another process; None: not tried

    @property
    def total(self) -> int:
        return self.micro * self.merge * self.ranks

    def __str__(self) -> str:
        tried = f", {format_bytes(self.tried)} when tried" if self.tried is not None else ""
        return (
            f"{self.micro} samples at a time: {format_bytes(self.predicted)} of {format_bytes(self.memory)}{tried}. "
            f"{self.total} = {self.micro} x {self.merge} merged steps x {self.ranks} ranks"
        )


def search(
    step: TrainingStep, memory: int, install: Callable[[TrainingStep], InstallSegments | None],
    *, global_batch: int | None, ranks: int, trial: bool,
) -> LargestBatch:  # fmt: skip
    """install: makes the segments for a step of a given batch."""

    def peak(n: int) -> int:
        sized = replace(step, batch=n)
        try:
            return estimate(sized, install(sized)).peak
        except ValueError:
            if n > 1:
                raise
            return peak(2)  # batch norm cannot take a single sample

    remedy = "use recompute with memory_budget='min', sharding, or an optimizer with less state"
    micro = largest(peak, memory)
    if not micro:
        raise StrategyError(
            f"a single sample needs {format_bytes(peak(1))}, but only {format_bytes(memory)} is allowed: {remedy}"
        )
    while True:
        micro, merge = solve(micro, global_batch, ranks)
        sized = replace(step, batch=micro)
        tried = try_out(sized, install(sized)) if trial else None
        if tried is None or tried <= memory:
            return LargestBatch(micro, merge, ranks, memory, peak(micro), tried)
        if micro == 1:
            raise StrategyError(
                f"a single sample needed {format_bytes(tried)} when tried, but only {format_bytes(memory)} is allowed: "
                f"{remedy}"
            )
        micro = max(1, min(micro - 1, int(micro * memory / tried)))


def largest(peak: Callable[[int], int], memory: int, limit: int = LIMIT) -> int:
    """The largest batch whose peak is within `memory`, or 0. Interpolates, because peaks grow almost linearly."""
    known: dict[int, int] = {}

    def fits(n: int) -> bool:
        if n not in known:
            known[n] = peak(n)
        return known[n] <= memory

    if not fits(1):
        return 0
    good, bad = 1, limit + 1
    guess = 2
    while bad - good > 1:
        guess = min(max(guess, good + 1), bad - 1)
        if fits(guess):
            good = guess
        else:
            bad = guess
        low, high = min(known), max(known)
        slope = (known[high] - known[low]) / (high - low)
        guess = int(good + (memory - known[good]) / slope) if slope > 0 else 2 * good
    return good


def solve(micro: int, global_batch: int | None, ranks: int) -> tuple[int, int]:
    """The largest micro, and merge, such that global_batch = micro x merge x ranks."""
    if ranks < 1 or (global_batch is not None and global_batch < 1):
        raise UsageError(f"global_batch = {global_batch} on {ranks} ranks: both must be at least 1")
    if global_batch is None:
        return micro, 1
    if global_batch % ranks:
        near = [n for n in (global_batch // ranks * ranks, (global_batch // ranks + 1) * ranks) if n]
        raise UsageError(
            f"global_batch = {global_batch} is not divisible by {ranks} ranks: use {' or '.join(map(str, near))}"
        )
    share = global_batch // ranks
    best = next(n for n in range(min(micro, share), 0, -1) if share % n == 0)
    return best, share // best


# --- trying it out --------------------------------------------------------------------------------
def try_out(step: TrainingStep, install: InstallSegments | None) -> int:
    """The peak of two real steps. Raises StrategyError if they fail."""
    if step.device.type == "cuda":
        return _try_on_cuda(step, install)
    answer = forked(lambda: _run(step, install), seconds=TRIAL_SECONDS)
    if answer.error:
        raise StrategyError(f"the trial with a batch of {step.batch} failed: {answer.error}")
    return int(answer.value)


def _try_on_cuda(step: TrainingStep, install: InstallSegments | None) -> int:
    """Runs in this process, because a full GPU only raises an error, and on a copy, to leave the user's model alone."""
    model, optimizer = copies(step.model, step.optimizer)
    step = replace(step, model=model, optimizer=optimizer)
    torch.cuda.reset_peak_memory_stats(step.device)
    try:
        _run(step, install)
    except torch.cuda.OutOfMemoryError as error:
        raise StrategyError(f"the trial with a batch of {step.batch} ran out of memory: {error}") from None
    return torch.cuda.max_memory_allocated(step.device)


def copies(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """A copy of the model, and an optimizer without state for it."""
    copied = copy.deepcopy(model)
    params = dict(zip(map(id, model.parameters()), copied.parameters(), strict=True))
    return copied, copy_optimizer(optimizer, params)


def _run(step: TrainingStep, install: InstallSegments | None) -> int:
    args, kwargs, targets = map_tensors(partial(_resize, step), (step.args, step.kwargs, step.targets))
    engine = Engine(compose(step.parts), step.model, step.optimizer, World(ProcessInfo(), step.device))
    forward: AroundForward = install(engine.model, engine.forward_context) if install is not None else nullcontext
    with Tracker() as tracker:
        for t in (*step.model.parameters(), *step.model.buffers(), *tensors_of((args, kwargs, targets))):
            tracker.see(t)
        for _ in range(2):
            with forward():
                out = step.model(*args, **kwargs)
            step.loss(out, targets).backward()
            step.optimizer.step()
            step.optimizer.zero_grad()
            del out
    return tracker.peak + step.extra_bytes


def _resize(step: TrainingStep, t: torch.Tensor) -> torch.Tensor:
    """Repeat the samples until there are `step.batch`."""
    if step.batch is None or not t.dim() or len(t) != step.samples:
        return t
    return t[torch.arange(step.batch, device=t.device) % len(t)]
