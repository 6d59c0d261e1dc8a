"""The summary as tables for the terminal and the page, as JSON, and as a plot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.large_batch import recipe
from benchmarks.large_batch.recipe import RECIPES
from benchmarks.large_batch.runs import Kept
from benchmarks.large_batch.summary import Cell, Summary
from benchmarks.large_batch.sweep import Plan, left

_MARKS = {"sgd": "o", "adamw": "s", "lars": "^", "lamb": "D", "muon": "v"}
Study = tuple[Plan, Summary]  # of one task


def rows(plan: Plan, summary: Summary) -> Iterator[list[str]]:
    """Score against share: mean, worst and best over the seeds."""
    yield ["share", "batch", "updates", *(RECIPES[name].title for name in plan.optimizers)]
    for share in plan.shares:
        cells = [summary.at(name, share) for name in plan.optimizers]
        updates = next((str(cell.updates) for cell in cells if cell), "")
        shown = [_score(summary, cell) if cell else "" for cell in cells]
        yield [f"{100 * share:g} %", f"{summary.task.batch(share):,}", updates, *shown]


def largest_rows(plan: Plan, summary: Summary) -> Iterator[list[str]]:
    """The largest share that keeps the baseline's score in equal epochs, and the rows that Paddle's table left open."""
    task, base = summary.task, summary.baseline
    yield ["", "largest share", task.measure, "at 2.5 %", "at 5 %"]
    if base:
        yield [f"baseline: {RECIPES[base.optimizer].title}", f"{100 * base.share:g} %", task.shown(base.test), "", ""]
    for name in plan.optimizers:
        best = summary.largest(name)
        figures = [f"{100 * best.share:g} %", task.shown(best.test)] if best else ["none", ""]
        rows_of_paddle = (_reached(summary, name, share) for share in (0.025, 0.05))
        yield [f"{RECIPES[name].title}, within {task.kept}", *figures, *rows_of_paddle]


def _reached(summary: Summary, name: str, share: float) -> str:
    cell = summary.at(name, share)
    if cell is None or summary.baseline is None:
        return ""
    return summary.task.shown(cell.test) + ("" if summary.keeps(cell) else " (not reached)")


def tried_rows(plan: Plan, summary: Summary) -> Iterator[list[str]]:
    """Everything tried, with its score on the held-out samples, and what was chosen."""
    yield ["optimizer", "share", "rate, decay (short warm-up): held-out score of seed 0", "chosen"]
    for name in plan.optimizers:
        for cell in summary.of(name):
            tried = "; ".join(
                f"{rate:g}, {decay:g}{_short(cell, warmup)}: {summary.task.shown(s)}"
                for rate, decay, warmup, s in cell.tried
            )
            chosen = f"{cell.rate:g}, {cell.decay:g}{_short(cell, cell.warmup)}" + " (edge)" * cell.at_edge
            yield [RECIPES[name].title, f"{100 * cell.share:g} %", tried, chosen]


def _short(cell: Cell, warmup: float) -> str:
    return " (short)" if warmup < recipe.warmup(cell.share) else ""


def _score(summary: Summary, cell: Cell) -> str:
    shown = summary.task.shown
    if len(cell.tests) == 1:
        return shown(cell.test)
    return f"{shown(cell.test)} ({shown(min(cell.tests))} to {shown(max(cell.tests))})"


def run_rows(studies: Sequence[Study], kept: Kept) -> Iterator[list[str]]:
    """How far the study is, and where and when its runs were made."""
    yield ["", "runs", "missing", "hours", "machine", "torch", "dates"]
    for plan, summary in studies:
        runs = [run for cell in plan.cells for run in plan.tried(cell, kept.outcomes)]
        hours = sum(kept.outcomes[run].seconds for run in runs) / 3600
        made = [kept.made[run] for run in runs if kept.made[run]]
        machines = sorted({f"{m['cpu']}, {m['cores']} cores" for m in made})
        versions = sorted({m["torch"] for m in made})
        days = sorted({m["date"][:10] for m in made})
        where = ["; ".join(machines), "; ".join(versions), " to ".join(dict.fromkeys(days[:1] + days[-1:]))]
        yield [summary.task.title, str(len(runs)), str(left(plan, kept.outcomes)), f"{hours:.1f}", *where]


def tables(studies: Sequence[Study], kept: Kept) -> Iterator[tuple[str, list[list[str]]]]:
    yield "runs", list(run_rows(studies, kept))
    for plan, summary in studies:
        task = summary.task
        yield f"{task.title}: test {task.measure} after {plan.epochs} epochs", list(rows(plan, summary))
        yield f"{task.title}: the largest share", list(largest_rows(plan, summary))
        yield f"{task.title}: rates and decays", list(tried_rows(plan, summary))


def as_table(title: str, lines: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(lines[0]):
        table.add_column(name, justify="left" if i == 0 else "right")
    for line in lines[1:]:
        table.add_row(*line)
    return table


def as_markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rest]) + "\n"


def write(path: Path, studies: Sequence[Study], kept: Kept, *, quick: bool) -> None:
    """Machine and date are those of the last run, so that a report made elsewhere or later writes the same file."""
    last = next(reversed(kept.made.values()))
    content = {
        "quick": quick,
        "machine": {key: value for key, value in last.items() if key not in ("commit", "date")},
        "commit": last.get("commit", ""),
        "date": last.get("date", ""),
        "incomplete": any(left(plan, kept.outcomes) for plan, _ in studies),
        "hours": round(sum(outcome.seconds for outcome in kept.outcomes.values()) / 3600, 2),
        "tasks": {plan.task: _json(plan, summary) for plan, summary in studies},
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def _json(plan: Plan, summary: Summary) -> dict[str, Any]:
    largest = {name: best.share if (best := summary.largest(name)) else None for name in plan.optimizers}
    cells = [asdict(cell) | {"test": cell.test} for cell in summary.cells]
    return {"plan": asdict(plan), "tolerance": summary.task.tolerance, "largest_share": largest, "cells": cells}


def plot(path: Path, studies: Sequence[Study], mark: str) -> None:
    """One half per task. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(studies), figsize=(6 * len(studies), 5), squeeze=False)
    for half, (plan, summary) in zip(axes[0], studies, strict=True):
        _half(half, plan, summary)
    figure.suptitle(f"equal epochs; mean, worst and best over the seeds{mark}")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _half(axes: Any, plan: Plan, summary: Summary) -> None:
    task = summary.task
    scale = 100.0 if task.measure == "accuracy" else 1.0
    value = (lambda s: scale * s) if task.measure == "accuracy" else (lambda s: float(task.shown(s)))
    for name in plan.optimizers:
        cells = summary.of(name)
        means = [value(cell.test) for cell in cells]
        limits = [sorted((value(min(cell.tests)), value(max(cell.tests)))) for cell in cells]
        below = [max(mean - low, 0.0) for mean, (low, _) in zip(means, limits, strict=True)]
        above = [max(high - mean, 0.0) for mean, (_, high) in zip(means, limits, strict=True)]
        axes.errorbar([100 * cell.share for cell in cells], means, yerr=[below, above], label=RECIPES[name].title,
                      marker=_MARKS[name], capsize=3, linewidth=1.2)  # fmt: skip
    if summary.baseline:
        edges = [value(summary.baseline.test - task.tolerance), value(summary.baseline.test)]
        axes.axhspan(*edges, color="grey", alpha=0.2, linewidth=0, label=f"within {task.kept}")
    axes.set_xscale("log")
    axes.set_xticks([100 * share for share in plan.shares], [f"{100 * share:g}" for share in plan.shares])
    unit = ", %" if task.measure == "accuracy" else ""
    axes.set(xlabel="share of the data per update, %", ylabel=f"test {task.measure}{unit}", title=task.title)
    axes.grid(alpha=0.3)
    axes.legend()
