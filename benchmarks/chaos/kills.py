"""`kill -9` of ranks, of fleetrun, and of both, in every phase of a training."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.chaos.marks import PHASES, now
from benchmarks.chaos.training import KINDS, Line, Training, differences, kill, reference

# Out of 100. A node is fleetrun with its ranks. These two are rare, because what follows them is a cold start.
VICTIMS = {"rank 0": 47, "rank 1": 45, "both ranks": 5, "fleetrun": 1.5, "node": 1.5}
PER_RUN = 60  # kills that one training gets before it may finish
_LONGEST = {"start": 0.15, "load": 0.02, "step": 0.05, "save": 0.01, "commit": 0.005, "any": 0.5}  # seconds


class Kills:
    """Kills number `first` and following, so that a table can be made in pieces."""

    def __init__(self, *, first: int, count: int, steps: int, tell: Callable[[str], None]):
        self._number, self._end, self._steps, self._tell = first, first + count, steps, tell
        self._folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        self._unbroken: dict[str, list[dict[int, Line]]] = {}

    def runs(self) -> Iterator[dict[str, Any]]:
        """The result of one training after the other."""
        try:
            for number in range(1000):
                if self._number >= self._end:
                    return
                kind = KINDS[self._number // PER_RUN % len(KINDS)]  # in turn, also if the table is made in pieces
                settings = {"kind": kind, "steps": self._steps}
                if kind not in self._unbroken:
                    self._tell(f"{kind}: the unbroken run")
                    self._unbroken[kind] = reference(self._folder / f"unbroken-{kind}", **settings)
                yield self._run(Training(self._folder / f"run-{number}", **settings), kind)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, training: Training, kind: str) -> dict[str, Any]:
        result: dict[str, Any] = {"kind": kind, "kills": [], "hangs": [], "failed": [], "orphans": 0}
        last = min(self._number + PER_RUN, self._end)
        training.start()
        try:
            while self._number < last and self._one(training, result):
                self._number += 1
                self._tell(f"{self._number} kills, {kind}, step {training.read(0).step} of {training.steps}")
            if training.finish():
                result["failed"].append("\n".join(text for _, text in training.messages[-30:]))
            result["orphans"] += len(training.orphans())
        except TimeoutError as error:
            result["hangs"].append(str(error))
        finally:
            training.destroy()
        _judge(training, result, self._unbroken[kind])
        shutil.rmtree(training.folder, ignore_errors=True)
        return result

    def _one(self, training: Training, result: dict[str, Any]) -> bool:
        """One kill; False if the training ended before."""
        chance = random.Random(f"kill {self._number}")
        (victim,) = chance.choices(list(VICTIMS), list(VICTIMS.values()))
        wanted = chance.choice([*PHASES, "any"])
        seen = 1 if victim == "rank 1" and wanted != "commit" else 0  # only rank 0 commits
        before = result["kills"][-1]["pids"] if result["kills"] else [0] * training.ranks

        def there() -> bool:
            mark = training.read(seen)
            return mark.pid != before[seen] and wanted in (mark.phase, "any")

        if not training.wait(there, pause=0.0002):
            return False
        time.sleep(chance.random() * _LONGEST[wanted])
        mark = training.read(seen)
        ranks = [training.read(rank).pid for rank in range(training.ranks)]
        agent = training.process.pid
        pids = {"rank 0": ranks[:1], "rank 1": ranks[1:2], "both ranks": ranks, "fleetrun": [agent]}
        at = kill(*pids.get(victim, [agent, *ranks]))
        record = {"victim": victim, "phase": mark.phase, "pids": ranks, "at": at, "step": mark.step}
        result["kills"].append(record | {"committed": training.committed()})
        if victim in ("fleetrun", "node"):
            training.process.wait()
            result["orphans"] += len(training.orphans())
            training.destroy()
            training.start()
        return True


def _judge(training: Training, result: dict[str, Any], unbroken: list[dict[int, Line]]) -> None:
    """Compare what was logged with the kills and with the unbroken run."""
    lines = training.lines(0)
    resumed = [line for line in lines if line.what == "resumed"]
    wrong = differences(training, unbroken)
    result["different"] = wrong[:20]
    result["corrupt"] = [text for text in wrong if " resumed " in text][:20]
    result["lines"] = sum(len(training.lines(rank)) for rank in range(training.ranks))
    result["resumed"] = len(resumed)
    # Each kill of ranks costs one restart: one more means that a restart failed and had to be repeated.
    restarts = sum("; restart " in text for _, text in training.messages)
    result["extra_restarts"] = max(restarts - sum(k["victim"] not in ("fleetrun", "node") for k in result["kills"]), 0)
    result["lost"] = sum(
        any(line.step < record["committed"] for line in resumed if line.time > record["at"])
        for record in result["kills"]
    )
    for record, following in zip(result["kills"], [*result["kills"][1:], {"at": now()}], strict=True):
        told = [t for t, text in training.messages if t > record["at"] and text.startswith("fleetrun: ")]
        at, until = record.pop("at"), following["at"]
        del record["pids"]
        again = [line.time for line in resumed if line.time > at]
        step = [line.time for line in lines if again and line.time > again[0] and line.what == "step"]
        heard = told and told[0] < until and record["victim"] not in ("fleetrun", "node")  # nobody is left to tell
        record["to_message"] = round(told[0] - at, 4) if heard else None
        record["to_step"] = round(step[0] - at, 4) if step and step[0] < until else None
