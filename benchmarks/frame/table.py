"""What is printed at the end: a line a benchmark."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from rich.markup import escape
from rich.table import Table

from benchmarks.frame.declare import Benchmark
from benchmarks.frame.result import Result
from benchmarks.frame.verdict import Verdict, ratio_of, shown

_COLOURS = {
    Verdict.MET: "green",
    Verdict.NOT_MET: "red",
    Verdict.TOO_NOISY: "yellow",
    Verdict.REPORTED: "cyan",
    Verdict.CANNOT_RUN: "yellow",
    Verdict.FAILED: "red",
}


def results(found: Iterable[Result]) -> Table:
    table = Table(title="ours / theirs: smaller is better", title_justify="left")
    table.add_column("benchmark", no_wrap=True)
    for name in ("ratio", "95 %", "goal"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    for r in found:
        figures = (f"{r.ratio.value:.3f}", f"{r.ratio.low:.3f}-{r.ratio.high:.3f}") if r.ratio else ("", "")
        table.add_row(r.benchmark.name, *figures, _goal(r.benchmark), f"[{_COLOURS[r.verdict]}]{escape(verdict(r))}[/]")
    return table


def verdict(result: Result) -> str:
    reason = result.reason.strip().splitlines()
    timed = result.ratio and result.sides and result.sides.unit == "s"
    if result.ratio and timed and (result.verdict is Verdict.REPORTED or result.benchmark.budget is not None):
        low, high = (shown(x) for x in (result.ratio.least_difference, result.ratio.most_difference))
        return f"{result.verdict.value}: {shown(result.ratio.difference)} a step ({low} to {high})"
    # The last line of a traceback is the one that says what happened.
    return f"{result.verdict.value}: {reason[-1]}" if reason else result.verdict.value


def line(result: Result) -> str:
    """The samples in short, as soon as they are there."""
    b, sides, ratio = result.benchmark, result.sides, result.ratio
    if sides is None or ratio is None:
        return f"  {verdict(result)}"
    ours, theirs = (_low_and_middle(x, sides.unit) for x in (sides.ours, sides.theirs))
    starts = ", by start " + " ".join(f"{ratio_of(s).value:.3f}" for s in result.by_start)
    counts = "".join(f"; {what} {x:,.0f} and {y:,.0f}" for what, (x, y) in sides.counts.items())
    if sides.cpu is not None:
        cpu = ratio_of(sides.cpu)
        counts += f"; CPU {cpu.value:.3f} ({cpu.low:.3f}-{cpu.high:.3f}), {shown(cpu.difference)} a step"
    return f"  {b.ours} {ours}, {b.theirs} {theirs} (minimum, median); spread {ratio.spread:.0%}{starts}{counts}"


def listing(known: Iterable[Benchmark]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("benchmark", "goal", "what is compared"):
        table.add_column(name)
    for b in known:
        table.add_row(b.name, _goal(b), escape(f"{b.meaning} ({b.ours} / {b.theirs})"))
    return table


def _low_and_middle(samples: list[float], unit: str) -> str:
    scale, unit = (1e3, "ms") if unit == "s" else (1, unit)
    return f"{min(samples) * scale:,.1f} {median(samples) * scale:,.1f} {unit}"


def _goal(benchmark: Benchmark) -> str:
    if benchmark.budget is not None:
        return f"≤ {shown(benchmark.budget)}"
    return "" if benchmark.goal is None else f"≤ {benchmark.goal:g}"
