"""From samples to a ratio, and from a ratio to a verdict, which is withheld when the samples do not carry it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from statistics import median

from benchmarks.frame.interleave import Sides

LARGEST_SPREAD = 0.25
CONFIDENCE = 0.95
MANY = 100  # pairs, of which the interval of the median can be trusted however far they spread
ENOUGH = 6  # pairs: all of them agree by chance with a probability of 1/64


class Verdict(Enum):
    MET = "met"
    NOT_MET = "not met"
    TOO_NOISY = "too noisy"
    REPORTED = "reported"  # there is no goal
    CANNOT_RUN = "cannot run"
    FAILED = "failed"


@dataclass(frozen=True)
class Ratio:
    """The median of the pairwise ratios, and how far it can be trusted."""

    value: float
    low: float  # the true median lies between low and high with 95 %, if there are ENOUGH pairs
    high: float
    least: float  # of the pairs
    most: float
    pairs: int
    spread: float  # from the 10th to the 90th percentile of the pairwise ratios, as a fraction of the median
    of_minima: float
    of_medians: float
    difference: float  # the median of the pairwise differences, per step, and its interval
    least_difference: float
    most_difference: float


def ratio_of(sides: Sides) -> Ratio:
    pairs = sorted(a / b for a, b in zip(sides.ours, sides.theirs, strict=True))
    value = median(pairs)
    low, high = interval(pairs)
    differences = sorted((a - b) / sides.steps for a, b in zip(sides.ours, sides.theirs, strict=True))
    least_difference, most_difference = interval(differences)
    return Ratio(
        value=value,
        low=low,
        high=high,
        least=pairs[0],
        most=pairs[-1],
        pairs=len(pairs),
        spread=(percentile(pairs, 0.9) - percentile(pairs, 0.1)) / value,
        of_minima=min(sides.ours) / min(sides.theirs),
        of_medians=median(sides.ours) / median(sides.theirs),
        difference=median(differences),
        least_difference=least_difference,
        most_difference=most_difference,
    )


def judge(ratio: Ratio, *, goal: float | None, budget: float | None = None) -> tuple[Verdict, str]:
    """The verdict and its reason."""
    if budget is not None:
        return _within(budget, ratio)
    if goal is None:
        return Verdict.REPORTED, ""
    one_voice = ratio.pairs >= ENOUGH and (ratio.most <= goal or ratio.least > goal)  # no noise could turn it
    if ratio.spread > LARGEST_SPREAD and ratio.pairs < MANY and not one_voice:
        return Verdict.TOO_NOISY, f"the pairs spread over {ratio.spread:.0%} of their median"
    if ratio.high <= goal:
        return Verdict.MET, ""
    if ratio.low > goal:
        return Verdict.NOT_MET, ""
    return Verdict.TOO_NOISY, f"the goal lies inside {ratio.low:.3f} to {ratio.high:.3f}: more rounds"


def _within(budget: float, ratio: Ratio) -> tuple[Verdict, str]:
    """A difference needs no limit on the spread: its interval is in the unit of the budget."""
    if ratio.most_difference <= budget:
        return Verdict.MET, ""
    if ratio.least_difference > budget:
        return Verdict.NOT_MET, ""
    low, high = shown(ratio.least_difference), shown(ratio.most_difference)
    return Verdict.TOO_NOISY, f"the budget lies inside {low} to {high}: more rounds"


def shown(seconds: float) -> str:
    """A difference, in the unit that suits it."""
    return f"{seconds * 1e6:+,.0f} µs" if abs(seconds) < 0.01 else f"{seconds * 1e3:+,.0f} ms"


def interval(ordered: list[float]) -> tuple[float, float]:
    """Between which samples the true median lies, whatever their distribution: each is above it with probability 1/2.

    P(fewer than k of n samples below the median) = sum over i < k of C(n, i) / 2^n, on either side.
    """
    n, tail, k = len(ordered), 0.0, 0
    while k < (n - 1) // 2:
        tail += math.comb(n, k) / 2**n
        if tail > (1 - CONFIDENCE) / 2:
            break
        k += 1
    k = max(k - 1, 0)
    return ordered[k], ordered[n - 1 - k]


def percentile(ordered: list[float], fraction: float) -> float:
    """Interpolated linearly between the two nearest samples."""
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
