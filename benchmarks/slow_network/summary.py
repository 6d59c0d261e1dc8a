"""Summarize the workers' rows: medians, lower bounds, and when a training reached its target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from benchmarks.netlab import link

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    """One method at one rate."""

    method: str
    rate: str | None
    seconds: list[float]
    sent: float  # bytes per step, counted by the interface
    bytes: int  # of the parameters

    @property
    def step(self) -> float:
        return median(self.seconds)

    @property
    def floor(self) -> float:
        """Seconds that the link needs for the bytes sent. 0 on an unshaped link."""
        return 8 * self.sent / link.bits(self.rate) if self.rate else 0.0


Cells = dict[tuple[str, str | None], Cell]  # by method and rate


def cells(rows: Rows, model: str) -> Cells:
    found: dict[tuple[str, str | None], list[dict[str, Any]]] = {}
    for row in rows:
        if row["model"] == model:
            found.setdefault((row["way"], row["rate"]), []).append(row)
    return {
        (method, rate): Cell(
            method, rate, [s for row in some for s in row["seconds"]], mean(row["sent"] for row in some),
            some[0]["bytes"],
        )
        for (method, rate), some in found.items()
    }  # fmt: skip


def reached(row: dict[str, Any], key: str, target: float) -> float | None:
    """When a training first reached this accuracy or loss, interpolated between evaluations. None: never."""
    sign = 1 if key == "accuracy" else -1
    before: dict[str, Any] | None = None
    for now in row["moments"]:
        if now[key] is None:
            return None  # diverged
        if sign * (now[key] - target) >= 0:
            if before is None:
                return now["seconds"]
            share = (target - before[key]) / (now[key] - before[key])
            return before["seconds"] + share * (now["seconds"] - before["seconds"])
        before = now
    return None
