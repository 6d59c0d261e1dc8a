"""One benchmark from start to JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.frame import machine, ranks
from benchmarks.frame.declare import Benchmark, CannotRunError
from benchmarks.frame.interleave import Run, Sides
from benchmarks.frame.verdict import ENOUGH, Ratio, Verdict, judge, ratio_of


@dataclass(frozen=True)
class Result:
    """What came of a benchmark. Without sides and ratio it did not come to a measurement."""

    benchmark: Benchmark
    verdict: Verdict
    reason: str
    by_start: tuple[Sides, ...] = ()
    sides: Sides | None = None  # pooled
    ratio: Ratio | None = None


def measured(benchmark: Benchmark, *, rounds: int | None, out: Path) -> Result:
    """Run a benchmark in its ranks, judge it, and write its JSON."""
    before = machine.load()
    where = {"size": benchmark.ranks, "seconds": benchmark.seconds}
    where |= {"threads": benchmark.threads, "environment": benchmark.environment}
    try:
        by_start = tuple(
            ranks.run(in_rank, benchmark.function, n, start, **where)[0]
            for start, n in enumerate(divided(rounds or benchmark.rounds, starts=benchmark.starts))
        )
    except CannotRunError as error:
        result = Result(benchmark, Verdict.CANNOT_RUN, str(error))
    except ranks.RankError as error:
        result = Result(benchmark, Verdict.FAILED, str(error))
    else:
        sides = Sides.pooled(by_start)
        ratio = ratio_of(sides)
        result = Result(benchmark, *judge(ratio, goal=benchmark.goal, budget=benchmark.budget), by_start, sides, ratio)
    write(result, out=out, load_before=before)
    return result


def in_rank(function: Any, rounds: int, start: int) -> Sides:
    """What each rank runs."""
    rank, size = 0, 1
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    return function(Run(rounds, rank=rank, size=size, start=start))


def divided(rounds: int, *, starts: int) -> list[int]:
    """The rounds of each start: an even number, so that each side is first in half of them; few need but one start."""
    starts = max(1, min(starts, rounds // ENOUGH))
    each = -(-rounds // starts)
    return [each + each % 2] * starts


def write(result: Result, *, out: Path, load_before: list[float]) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{result.benchmark.name}.json"
    path.write_text(json.dumps(as_json(result, load_before=load_before), indent=1) + "\n")
    return path


def as_json(result: Result, *, load_before: list[float]) -> dict[str, Any]:
    b, sides, ratio = result.benchmark, result.sides, result.ratio
    return {
        "name": b.name,
        "meaning": b.meaning,
        "goal": b.goal,
        "budget": b.budget,
        "verdict": result.verdict.value,
        "reason": result.reason,
        "ratio": ratio.value if ratio else None,
        "statistics": asdict(ratio) if ratio else None,
        "ratio_by_start": [ratio_of(s).value for s in result.by_start],
        "unit": sides.unit if sides else None,
        "steps_per_sample": sides.steps if sides else None,
        "ours": _side(b.ours, sides.ours) if sides else None,
        "theirs": _side(b.theirs, sides.theirs) if sides else None,
        "counts": {k: {"ours": a, "theirs": b} for k, (a, b) in sides.counts.items()} if sides else {},
        "cpu": asdict(ratio_of(sides.cpu)) if sides and sides.cpu else None,
        "notes": sides.notes if sides else {},
        "ranks": b.ranks,
        "threads_per_rank": b.threads,
        "environment": dict(b.environment),  # on top of the one of the machine
        "machine": machine.machine(),
        "load_before": load_before,
        "load_after": machine.load(),
        "command": [sys.executable, *sys.argv],
        "commit": machine.commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _side(label: str, samples: list[float]) -> dict[str, Any]:
    return {"label": label, "minimum": min(samples), "median": median(samples), "samples": samples}
