"""What the page shows, computed from the lines of a record."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fleetx.record.read import Record, RecordLine
from fleetx.record.schema import TIMES, number

Points = list[tuple[float, float]]  # (round, value)
MOST_POINTS = 400  # per curve
STRAGGLES = 1.1  # times the median of the other ranks' own work


def curves(record: Record) -> dict[str, Points]:
    """What changes from round to round, by name. Curves without data are left out."""
    found: dict[str, Points] = {}
    for key in ("loss", "rate", "norm", "scale", "k", "sent"):
        found[key] = [(r["round"], y) for r in record.rounds if (y := number(r.get(key))) is not None]
    found["throughput"] = throughput(record)
    for line in record.values:
        for name, value in line["values"].items():
            if (y := number(value)) is not None:
                found.setdefault(name, []).append((line["round"], y))
    return {name: points for name, points in found.items() if points}


def throughput(record: Record) -> Points:
    """Samples per second of all replicas, without evaluations, saves and the first round, which includes set-up."""
    found = []
    for r in record.rounds[1:]:
        seconds = r["seconds"] - r["time"]["other"]
        if seconds > 0 and r["samples"]:
            found.append((r["round"], r["samples"] * replicas(record, r["model"]) / seconds))
    return found


def replicas(record: Record, model: int = 0) -> int:
    plan = record.plans.get(model)
    return int(plan["replicas"]) if plan else 1


def thinned(points: Points, most: int = MOST_POINTS) -> Points:
    """Drop points but keep the shape: the first and the last point, and of each piece the lowest, the highest and one
    that is not finite."""
    if len(points) <= most:
        return points
    pieces, kept = most // 2, {0, len(points) - 1}
    for i in range(pieces):
        piece = range(i * len(points) // pieces, (i + 1) * len(points) // pieces)
        finite = [j for j in piece if math.isfinite(points[j][1])] or list(piece)
        kept |= {min(finite, key=lambda j: points[j][1]), max(finite, key=lambda j: points[j][1])}
        kept |= set([j for j in piece if not math.isfinite(points[j][1])][:1])
    return [points[j] for j in sorted(kept)]


@dataclass(frozen=True)
class Share:
    """What one rank used per round."""

    rank: int
    time: dict[str, float]  # seconds
    sent: float | None  # bytes
    peak: int | None  # bytes, of the whole run
    host: str

    @property
    def own(self) -> float:
        """Seconds of its own work, without waiting for others."""
        return sum(self.time[kind] for kind in ("data", "forward_backward", "update"))


def shares(record: Record) -> list[Share]:
    """By rank. The totals of a rank restart with its process, so only the last process counts."""
    found = []
    for rank, lines in sorted(record.ranks.items()):
        last, first = lines[-1], lines[-1].get("first", {})
        once = first if last["rounds"] > 1 else {}  # the first round includes set-up
        rounds = max(last["rounds"] - bool(once), 1)
        time = {kind: max(last["time"].get(kind, 0.0) - once.get(kind, 0.0), 0.0) / rounds for kind in TIMES}
        sent = last["sent"] / max(last["rounds"], 1) if "sent" in last else None
        found.append(Share(rank, time, sent, last.get("peak"), last.get("host", "")))
    return found


def of_step(used: RecordLine, plan: RecordLine, on_gpu: bool) -> int:
    """Peak bytes to compare with the prediction. Without a GPU, the peak is that of the whole process: subtract what it
    held before its first step, except for the parameters."""
    return int(used["peak"] if on_gpu else used["peak"] - used.get("before", 0) + plan["bytes"]["parameters"])


def stragglers(found: list[Share]) -> list[tuple[Share, float]]:
    """Ranks that the others wait for, slowest first, with the ratio of their own work to the median of the others'."""
    if len(found) < 2:
        return []
    rest = {s.rank: [o.own for o in found if o.rank != s.rank] for s in found}
    slow = [(s, s.own / usual) for s in found if (usual := statistics.median(rest[s.rank])) > 0]
    return sorted([(s, ratio) for s, ratio in slow if ratio > STRAGGLES], key=lambda pair: -pair[1])


def step_traces(record: Record) -> list[RecordLine]:
    """The traces of the last round that all ranks have traced, by rank."""
    rounds: dict[tuple[int, int], dict[int, RecordLine]] = {}
    for trace in record.traces:
        rounds.setdefault((trace["model"], trace["round"]), {})[trace["rank"]] = trace
    whole = [by_rank for by_rank in rounds.values() if len(by_rank) == record.size] or list(rounds.values())
    return [trace for _, trace in sorted(whole[-1].items())] if whole else []


def counts(events: Iterable[RecordLine]) -> Counter[str]:
    return Counter(event["what"] for event in events if event["rank"] == 0 or event["what"] == "fault")


def summary(record: Record) -> dict[str, str]:
    """The run in a few numbers, ready to print."""
    start, rounds, drawn = record.starts[-1], record.rounds, curves(record)
    plan: Any = record.plans.get(0, {})
    found = {"model": f"{plan['name']}, {plan['parameters']:,} parameters"} if plan else {}
    found["ranks"] = f"{start['ranks']} on {start['device']}"
    if plan:
        found["strategies"] = ", ".join(k for k, v in plan["strategy"].items() if v is True) or "none"
    found["updates"] = f"{rounds[-1]['round']:,}" if rounds else "none yet"
    if "loss" in drawn:
        found["last loss"] = f"{drawn['loss'][-1][1]:.4g}"
    if "throughput" in drawn:
        speed = statistics.median(y for _, y in drawn["throughput"])
        found["samples per second"] = f"{speed:,.0f} (median)" if speed >= 1000 else f"{speed:.4g} (median)"
    if rounds:
        usual = statistics.mode(r["samples"] for r in rounds)  # the last of an epoch may have fewer
        found["samples per update"] = f"{usual * replicas(record):,}"
        found["time"] = duration(rounds[-1]["t"] - record.starts[0]["t"])
    told = counts(record.events)
    skipped = told["overflow"] + told["skipped"]
    found["skipped updates"] = f"{skipped}" + (f" ({told['overflow']} overflows)" if told["overflow"] else "")
    if sent := [s.sent for s in shares(record) if s.sent is not None]:
        found["sent per update"] = f"{size(max(sent))} (most of any rank)"
    found["state"] = state(record)
    return found


def state(record: Record) -> str:
    last = [e["what"] for e in record.events if e["t"] >= record.starts[-1]["t"]]
    if "fault" in last:
        return "ended with an error"
    if "end" in last:
        return "ended"
    return f"running, or killed; last line at {time.strftime('%H:%M:%S', time.gmtime(record.last))} UTC"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def size(number_of_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number_of_bytes < 1024 or unit == "GiB":
            return f"{number_of_bytes:.4g} {unit}"
        number_of_bytes /= 1024
    raise AssertionError


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
