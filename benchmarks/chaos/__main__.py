"""python -m benchmarks.chaos: break a training in every way, and show what came of it."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from benchmarks.chaos import disk, report
from benchmarks.chaos.goodput import goodput
from benchmarks.chaos.kills import Kills
from benchmarks.chaos.stalls import stalls
from benchmarks.chaos.training import ROOT
from benchmarks.frame import machine

PARTS = ("kills", "damage", "disk", "stalls", "goodput")
PIECE = 500  # flips after which the results are written


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", default=",".join(PARTS), show_default=True, help="Which parts to run.")
@click.option("--kills", default=1000, show_default=True, help="`kill -9` in all, with those of earlier calls.")
@click.option("--flips", default=10_000, show_default=True, help="Bits to flip in all.")
@click.option("--damages", default=1000, show_default=True, help="Files to cut off, remove or swap in all.")
@click.option("--stalls", "stalled", default=5, show_default=True, help="Ranks to stop, and links to cut.")
@click.option("--seconds", default=240, show_default=True, help="Of training for the goodput, a kill every 60 of them.")
@click.option("--steps", default=600, show_default=True, help="Of each training that is killed.")
@click.option("--jobs", default=2, show_default=True, help="Trainings that are killed at the same time.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=ROOT / "docs" / "results", help="For chaos.json and .md."
)
@click.option("--fresh", is_flag=True, help="Forget the results that are there, instead of adding to them.")
@click.option("--strict", is_flag=True, help="Exit with 1 if anything was lost, differed, hung or was left.")
def main(only: str, kills: int, flips: int, damages: int, stalled: int, seconds: float, steps: int, jobs: int,
         out: Path, fresh: bool, strict: bool) -> None:  # fmt: skip
    """Kill, stop, cut off, fill up and damage a real training; a quarter of an hour on two idle cores.

    Results are written as they come: run it again to continue, or in pieces with smaller numbers.
    """
    logging.disable(logging.WARNING)  # what fleet.latest says of every damaged checkpoint
    out.mkdir(parents=True, exist_ok=True)
    results = Results(out, fresh=fresh)
    acts: dict[str, Callable[[], None]] = {
        "kills": lambda: _kills(results, kills, steps, jobs),
        "damage": lambda: _damage(results, flips, damages),
        "disk": lambda: _disk(results),
        "stalls": lambda: _stalls(results, stalled),
        "goodput": lambda: results.update("goodput", goodput(seconds=seconds, tell=_tell)),
    }
    for part in only.split(","):
        if part not in acts:
            raise click.BadParameter(f"--only {part}: must be one of {', '.join(PARTS)}")
        begin = time.monotonic()
        acts[part]()
        taken = results.data["seconds"].get(part, 0) + time.monotonic() - begin
        results.update("seconds", results.data["seconds"] | {part: round(taken, 1)})
    print("\n" + report.page(results.data))
    if strict and any(report.summary(results.data).values()):
        sys.exit(1)


class Results:
    """chaos.json and chaos.md, written after each piece."""

    def __init__(self, out: Path, *, fresh: bool):
        self._file, self._page = out / "chaos.json", out / "chaos.md"
        self.data: dict[str, Any] = {
            "kills": [], "flips": {}, "damages": {}, "fallbacks": {}, "disk": {}, "stalls": [], "goodput": {},
            "seconds": {},
        }  # fmt: skip
        if self._file.exists() and not fresh:
            self.data |= json.loads(self._file.read_text())
        where = machine.machine() | {"commit": machine.commit(), "load_before": machine.load()}
        self.data["machine"] = where
        self.data["command"] = "python -m benchmarks.chaos"

    def update(self, part: str, value: Any) -> None:
        self.data[part] = value
        self.data["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        lines = [f"{json.dumps(name)}: {json.dumps(found)}" for name, found in self.data.items()]
        self._file.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        self._page.write_text(report.page(self.data))


def _kills(results: Results, total: int, steps: int, jobs: int) -> None:
    first = sum(len(run["kills"]) for run in results.data["kills"])
    count = max(total - first, 0)
    shares = [count // jobs + (number < count % jobs) for number in range(jobs)]
    begins = [first + sum(shares[:number]) for number in range(jobs)]

    def work(number: int) -> None:
        def tell(text: str) -> None:
            _tell(f"job {number}: {text}")

        for run in Kills(first=begins[number], count=shares[number], steps=steps, tell=tell).runs():
            results.update("kills", [*results.data["kills"], run])

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, [number for number in range(jobs) if shares[number]]))


def _damage(results: Results, flips: int, damages: int) -> None:
    from benchmarks.chaos import damage

    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        target = damage.Target(folder)
        for name, act, total in (("flips", damage.flips, flips), ("damages", damage.damages, damages)):
            table = results.data[name]
            while (first := sum(sum(row.values()) for row in table.values())) < total:
                outcomes = act(target, first=first, count=min(PIECE, total - first))
                damage.tally(outcomes, table, lambda n, first=first, name=name: _tell(f"{first + n} {name}"))
                results.update(name, table)
        first = sum(results.data["fallbacks"].values())
        found = Counter(damage.fallbacks(target, first=first, count=max(damages // 10 - first, 0)))
        results.update("fallbacks", dict(found + Counter(results.data["fallbacks"])))
        target.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _disk(results: Results) -> None:
    _tell("disk: every call of a save")
    results.update("disk", {"calls": disk.each_call()})
    _tell("disk: full")
    results.update("disk", results.data["disk"] | {"full": disk.full_disk()})


def _stalls(results: Results, count: int) -> None:
    results.update("stalls", list(stalls(count=count, tell=_tell)))


_told = 0.0


def _tell(text: str) -> None:
    """On a terminal, always; in a log, a line every ten seconds."""
    global _told
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    elif time.monotonic() - _told > 10:
        print(text, file=sys.stderr, flush=True)
        _told = time.monotonic()


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.chaos")
