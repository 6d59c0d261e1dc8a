"""How much of the time is training, if a rank is killed every minute."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.chaos.marks import now
from benchmarks.chaos.training import Line, Training, disagreements, kill

ENDLESS = 10**9


def goodput(*, seconds: float, between: float = 60.0, tell: Callable[[str], None]) -> dict[str, Any]:
    """Train an MLP of 1 MB for `seconds`, saved in the background, and kill a rank every `between` seconds."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    training = Training(folder, kind="background", steps=ENDLESS, every=50, width=512).start()
    kills, chance = 0, random.Random("goodput")
    try:
        training.wait(lambda: training.read(0).step > 0)
        begin = now()
        while (elapsed := now() - begin) < seconds:
            if elapsed > (kills + 0.5) * between:
                kill(training.read(chance.randrange(training.ranks)).pid)
                kills += 1
            if not training.running:
                raise RuntimeError(f"fleetrun ended: {[text for _, text in training.messages[-5:]]}")
            _pause(training, 0.2)
            tell(f"goodput: {elapsed:.0f} of {seconds:.0f} s, {kills} kills")
    finally:
        training.destroy()
    lines = training.lines(0)
    different = disagreements(training)[:5]
    shutil.rmtree(folder, ignore_errors=True)
    return {"seconds": seconds, "between": between, "kills": kills, "different": different} | account(lines)


def _pause(training: Training, seconds: float) -> None:
    until = now() + seconds
    training.wait(lambda: now() > until, pause=0.05)


def account(lines: list[Line]) -> dict[str, Any]:
    """Of the time from the first to the last step, the share that was not lost.

    A restart loses what lies between the first time that its step was done, and the next step after the restart, except
    for the time that this one step takes.
    """
    steps = [line for line in lines if line.what == "step"]
    usual = median(b.time - a.time for a, b in pairwise(steps) if b.step == a.step + 1)
    done: dict[int, float] = {}
    lost, resumed = [], None
    for line in lines:
        if line.what == "resumed" and done:
            resumed = line
        elif line.what == "step":
            if resumed is not None:
                lost.append(max(line.time - done.get(resumed.step, line.time) - usual, 0.0))
                resumed = None
            done.setdefault(line.step, line.time)
    wall = steps[-1].time - steps[0].time
    return {"goodput": 1 - sum(lost) / wall, "lost": [round(x, 3) for x in lost], "step_seconds": usual, "wall": wall}
