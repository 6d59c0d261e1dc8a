"""The critical batch: from the losses of branches with different batches to a table, a plot and a recommendation.

The steps S and samples E that batches of B need to reach a fixed loss follow S = S_min (1 + C / B) and E = S B. At the
critical batch C, both are twice their minimum (McCandlish et al. 2018, arXiv 1812.06162, equation 2.11).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fleetx.planner import plots


@dataclass(frozen=True)
class BranchResult:
    """The losses of a branch, one per step, and how it was made."""

    merge: int  # a factor of the script's own number of merged steps
    rate: float  # a factor of the script's own rate
    losses: list[float]
    feed: int  # samples of a step on one replica
    replicas: int
    merged: int  # steps per update
    lr: float  # the script's own rate

    @property
    def step_samples(self) -> int:
        return self.feed * self.replicas

    @property
    def batch(self) -> int:
        return self.step_samples * self.merged


@dataclass(frozen=True)
class Reached:
    """The best branch of one batch, and when it reached the target."""

    branch: BranchResult
    steps: int | None  # of the loop; None: it did not reach the target

    @property
    def samples(self) -> int | None:
        return None if self.steps is None else self.steps * self.branch.step_samples

    @property
    def updates(self) -> int | None:
        return None if self.steps is None else math.ceil(self.steps / self.branch.merged)


@dataclass(frozen=True)
class Study:
    target: float
    rows: list[Reached]  # by batch
    least_updates: float | None  # S_min of the fit; None: too few batches reached the target, or they do not fit
    critical: float | None


def trailing(losses: Sequence[float], window: int) -> list[float]:
    """After each step, the mean of the last `window` losses, or of all losses so far if there are fewer."""
    total, out = 0.0, []
    for i, loss in enumerate(losses):
        total += loss - (losses[i - window] if i >= window else 0.0)
        out.append(total / min(i + 1, window))
    return out


def study(branches: Sequence[BranchResult], steps: int, window: int) -> Study:
    """steps: the target is the smallest batch's best loss after this many. window: steps to average losses over.

    Every branch reads the same data in the same order, and a window has the same number of samples in all of them.
    """
    batches = sorted({b.batch for b in branches})
    smallest = [b for b in branches if b.batch == batches[0]]
    target = min(trailing(b.losses, window)[steps - 1] for b in smallest)
    rows = [_best([b for b in branches if b.batch == batch], target, window) for batch in batches]
    points = [(row.branch.batch, row.updates) for row in rows if row.updates is not None]
    fitted = _fit(points) if len(points) > 2 else None
    return Study(target, rows, *(fitted or (None, None)))


def _best(alike: Sequence[BranchResult], target: float, window: int) -> Reached:
    found = [Reached(b, _first(trailing(b.losses, window), target, window)) for b in alike]
    return min(found, key=lambda r: (r.steps is None, r.steps or 0, trailing(r.branch.losses, window)[-1]))


def _first(smooth: Sequence[float], target: float, window: int) -> int | None:
    """The first step after which the smoothed loss has reached the target, if any."""
    return next((i + 1 for i, loss in enumerate(smooth) if i + 1 >= window and loss <= target), None)


def _fit(points: Sequence[tuple[int, int]]) -> tuple[float, float] | None:
    """Fit S = S_min + S_min C / B, minimizing relative errors. Returns (S_min, C), or None if either is not above 0."""
    batches, updates = np.array(points, np.float64).T
    slope, least = np.polyfit(1 / batches, updates, 1, w=1 / updates).tolist()
    return (least, slope / least) if least > 0 and slope > 1e-9 * least else None  # rounding: 0 comes out as nearly 0


def recommended(found: Study) -> Reached:
    """The largest batch that reached the target and is not above the critical one; the smallest if all are above."""
    fine = [row for row in found.rows if row.steps is not None]
    if found.critical is None:  # no fit: at most twice the fewest samples, which is what the critical batch costs
        fewest = min(row.samples or 0 for row in fine)
        return [row for row in fine if (row.samples or 0) <= 2 * fewest][-1]
    return ([row for row in fine if row.branch.batch <= found.critical * 1.01] or fine[:1])[-1]


def text(found: Study) -> str:
    lines = [
        f"to a loss of {found.target:.4g}:",
        f"{'batch':>8}  {'merge':>5}  {'rate':>9}  {'updates':>8}  {'samples':>10}",
    ]
    for row in found.rows:
        b = row.branch
        reached = "not reached" if row.steps is None else f"{row.updates:8}  {row.samples:10}"
        lines.append(f"{b.batch:8}  {b.merged:5}  {b.lr * b.rate:9.3g}  {reached}")
    if found.critical is not None:
        inside = found.rows[0].branch.batch <= found.critical <= found.rows[-1].branch.batch
        beyond = "" if inside else ", outside the measured batches: measure there as well before you rely on it"
        lines.append(
            f"critical batch: {found.critical:.0f} samples (at least {found.least_updates:.0f} updates){beyond}"
        )
    else:
        lines.append("no critical batch: fewer than three batches reached the loss, or larger ones saved no updates")
    row = recommended(found)
    b = row.branch
    lines.append(f"recommended: batch {b.batch}: k_steps = {b.merged} of gradient_merge, lr = {b.lr * b.rate:.3g}")
    return "\n".join(lines)


def plot(found: Study, path: Path) -> None:
    rows = [row for row in found.rows if row.steps is not None]
    batches = [row.branch.batch for row in rows]
    axes = plots.axes(2, (9, 4))
    for axis, name, values in (
        (axes[0], "updates", [row.updates for row in rows]),
        (axes[1], "samples", [row.samples for row in rows]),
    ):
        axis.plot(batches, values, "o", label="measured")
        if found.critical is not None and found.least_updates is not None:
            curve = [found.least_updates * (1 + found.critical / b) * (1 if name == "updates" else b) for b in batches]
            axis.plot(batches, curve, ":", color="grey", label="fit")
            axis.axvline(found.critical, color="grey", lw=0.5, label=f"critical batch: {found.critical:,.0f}")
        plots.finish(axis, batches, xlabel="batch (samples)", ylabel=f"{name} to a loss of {found.target:.4g}")
    plots.save(axes[0], path)
