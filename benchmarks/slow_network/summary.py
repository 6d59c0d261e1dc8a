"""What the rows of the workers say: medians and ranges, the floors under them, and the moment a training got there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from benchmarks.netlab import link

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Cell:
    """One way at one rate."""

    way: str
    rate: str | None
    seconds: list[float]
    sent: float  # bytes a step, by the counter of the interface
    bytes: int  # of the parameters

    @property
    def step(self) -> float:
        return median(self.seconds)

    @property
    def floor(self) -> float:
        """Seconds that the link needs for what was sent; none is needed where nothing holds it back."""
        return 8 * self.sent / link.bits(self.rate) if self.rate else 0.0


Cells = dict[tuple[str, str | None], Cell]  # by way and rate


def cells(rows: Rows, model: str) -> Cells:
    found: dict[tuple[str, str | None], list[dict[str, Any]]] = {}
    for row in rows:
        if row["model"] == model:
            found.setdefault((row["way"], row["rate"]), []).append(row)
    return {
        (way, rate): Cell(way, rate, [s for row in some for s in row["seconds"]], mean(row["sent"] for row in some),
                          some[0]["bytes"])
        for (way, rate), some in found.items()
    }  # fmt: skip


def reached(row: dict[str, Any], key: str, target: float) -> float | None:
    """When a training first had this accuracy or loss, between two looks by a straight line; None: never."""
    sign = 1 if key == "accuracy" else -1
    before: dict[str, Any] | None = None
    for now in row["moments"]:
        if now[key] is None:
            return None  # it has diverged
        if sign * (now[key] - target) >= 0:
            if before is None:
                return now["seconds"]
            share = (target - before[key]) / (now[key] - before[key])
            return before["seconds"] + share * (now["seconds"] - before["seconds"])
        before = now
    return None
