"""Both sides in turn, A B B A A B ..., so that whatever slows the machine for a while slows both."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

Made = TypeVar("Made")
Side = Callable[[], float]  # does its work once and returns what it cost

WARM_UP = 2  # DDP rebuilds its buckets in the second step, so one is not enough


@dataclass(frozen=True)
class Sides:
    """What was measured. `ours[i]` and `theirs[i]` were taken back to back and are compared with each other."""

    ours: list[float]
    theirs: list[float]
    steps: int = 1  # how many steps one sample holds
    unit: str = "s"
    counts: dict[str, tuple[float, float]] = field(default_factory=dict)  # of ours and theirs: what no noise disturbs
    notes: dict[str, Any] = field(default_factory=dict)  # figures besides, for the JSON
    cpu: Sides | None = None  # the same pairs in CPU seconds of this process, which other work disturbs less

    def __post_init__(self) -> None:
        if not self.ours or len(self.ours) != len(self.theirs):
            raise ValueError(f"samples come in pairs: {len(self.ours)} of ours, {len(self.theirs)} of theirs")

    @staticmethod
    def pooled(several: Sequence[Sides]) -> Sides:
        """The samples of several starts together; everything else is taken from the first."""
        ours = [x for sides in several for x in sides.ours]
        theirs = [x for sides in several for x in sides.theirs]
        cpu = [sides.cpu for sides in several if sides.cpu is not None]
        return replace(several[0], ours=ours, theirs=theirs, cpu=Sides.pooled(cpu) if cpu else None)


@dataclass(frozen=True)
class Run:
    """Handed to a benchmark: how often to measure, and which of the processes this is."""

    rounds: int
    rank: int = 0
    size: int = 1
    start: int = 0  # how often the benchmark was started before, in other processes

    def both(self, ours: Callable[[], Made], theirs: Callable[[], Made]) -> tuple[Made, Made]:
        """Make both sides; theirs first in every other start, because the one made first was 1 % slower here."""
        if self.start % 2:
            second = theirs()
            return ours(), second
        return ours(), theirs()

    def compare(
        self,
        ours: Callable[[], Any],
        theirs: Callable[[], Any],
        *,
        steps: int = 1,
        warm_up: int = WARM_UP,
        **notes: Any,
    ) -> Sides:
        """Time two pieces of work against each other. Every rank must call it; each begins a sample together."""
        wait = _barrier if self.size > 1 else _nothing
        spent: tuple[list[float], list[float]] = ([], [])
        sides = [clocked(work, wait=wait, cpu=cpu) for work, cpu in zip((ours, theirs), spent, strict=True)]
        a, b = interleave(*sides, rounds=self.rounds, warm_up=warm_up)
        calls = (count_calls(ours) / steps, count_calls(theirs) / steps)
        cpu = Sides(*(seconds[warm_up:] for seconds in spent), steps=steps)
        return Sides(a, b, steps=steps, counts={"calls a step": calls}, notes=notes, cpu=cpu)


def interleave(ours: Side, theirs: Side, *, rounds: int, warm_up: int = WARM_UP) -> tuple[list[float], list[float]]:
    """One sample of each side per round; every other round begins with the other side."""
    for _ in range(warm_up):
        ours(), theirs()
    gc.collect()
    gc.freeze()  # a full collection would cost 50 ms and hit one side at random; each still pays for its own garbage
    a: list[float] = []
    b: list[float] = []
    try:
        for i in range(rounds):
            for side, samples in ((ours, a), (theirs, b))[:: -1 if i % 2 else 1]:
                samples.append(side())
    finally:
        gc.unfreeze()
    return a, b


def clocked(work: Callable[[], Any], *, wait: Callable[[], Any], cpu: list[float] | None = None) -> Side:
    """The seconds that `work` takes, counted from when everybody is ready; `cpu` collects the CPU seconds."""

    def side() -> float:
        wait()
        start, began = time.perf_counter(), time.process_time()
        work()
        seconds = time.perf_counter() - start
        if cpu is not None:
            cpu.append(time.process_time() - began)
        return seconds

    return side


def count_calls(work: Callable[[], Any]) -> int:
    """How many functions Python calls while `work` runs, also those of C: what a loaded machine cannot change."""
    calls = 0

    def event(frame: Any, kind: str, arg: Any) -> None:
        nonlocal calls
        calls += kind in ("call", "c_call")

    sys.setprofile(event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def _barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


def _nothing() -> None:
    pass
