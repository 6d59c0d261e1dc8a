"""The summary as tables for the terminal, as Markdown, as JSON, and as a plot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.large_batch.recipe import RECIPES
from benchmarks.large_batch.summary import TOLERANCE, Cell, Summary
from benchmarks.large_batch.sweep import Plan

POINTS = f"{100 * TOLERANCE:g} points"
NEAR = 4  # points below the baseline in the right half of the plot
_MARKS = {"sgd": "o", "adamw": "s", "lars": "^", "lamb": "D"}


def rows(plan: Plan, summary: Summary) -> Iterator[list[str]]:
    """Accuracy against batch: mean, minimum and maximum over the seeds."""
    yield ["batch", "updates", *(RECIPES[name].title for name in plan.optimizers)]
    for batch in plan.batches:
        cells = [summary.at(name, batch) for name in plan.optimizers]
        updates = next((str(cell.updates) for cell in cells if cell), "")
        yield [f"{batch:,}", updates, *(_accuracy(cell) if cell else "" for cell in cells)]


def largest_rows(plan: Plan, summary: Summary) -> Iterator[list[str]]:
    """The largest batch that keeps the baseline's accuracy with the same number of epochs."""
    yield ["", "batch", "epochs", "top1"]
    base = summary.baseline
    if base:
        yield [f"baseline: {RECIPES[base.optimizer].title}", f"{base.batch:,}", str(plan.epochs), f"{base.test:.2%}"]
    for name in plan.optimizers:
        best = summary.largest(name)
        figures = [f"{best.batch:,}", str(plan.epochs), f"{best.test:.2%}"] if best else ["none", str(plan.epochs), ""]
        yield [f"{RECIPES[name].title}, largest within {POINTS}", *figures]


def rate_rows(plan: Plan, summary: Summary) -> Iterator[list[str]]:
    """Every rate tried, with its accuracy on the held-out images, and the chosen one."""
    yield ["optimizer", "batch", "rates tried: held-out accuracy of seed 0", "chosen"]
    for name in plan.optimizers:
        for cell in summary.of(name):
            tried = ", ".join(f"{rate:g}: {accuracy:.2%}" for rate, accuracy in cell.tried.items())
            yield [RECIPES[name].title, f"{cell.batch:,}", tried, f"{cell.rate:g}" + " (edge)" * cell.at_edge]


def _accuracy(cell: Cell) -> str:
    if len(cell.tests) == 1:
        return f"{cell.test:.2%}"
    return f"{cell.test:.2%} ({100 * min(cell.tests):.2f}-{100 * max(cell.tests):.2f})"


def as_table(title: str, lines: Iterator[list[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(next(lines)):
        table.add_column(name, justify="left" if i == 0 else "right")
    for line in lines:
        table.add_row(*line)
    return table


def as_markdown(lines: Iterator[list[str]]) -> str:
    head, *rest = lines
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rest]) + "\n"


def write(out: Path, plan: Plan, summary: Summary, notes: dict[str, Any]) -> None:
    cells = [asdict(cell) | {"tried": [*cell.tried.items()], "test": cell.test} for cell in summary.cells]
    largest = {name: best.batch if (best := summary.largest(name)) else None for name in plan.optimizers}
    content = notes | {"plan": asdict(plan), "tolerance": TOLERANCE, "largest_batch": largest, "cells": cells}
    (out / "large_batch.json").write_text(json.dumps(content, indent=1) + "\n")
    parts = [as_markdown(lines(plan, summary)) for lines in (rows, largest_rows, rate_rows)]
    (out / "large_batch.md").write_text("\n".join(parts))


def plot(path: Path, plan: Plan, summary: Summary, title: str) -> None:
    """All results on the left, those near the baseline on the right. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (full, near) = pyplot.subplots(1, 2, figsize=(12, 5))
    for axes in (full, near):
        for name in plan.optimizers:
            _line(axes, name, summary.of(name))
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(plan.batches), [f"{batch}" for batch in plan.batches])
        axes.set(xlabel="batch", ylabel="test accuracy, %")
        axes.grid(alpha=0.3)
    if summary.baseline:
        base = 100 * summary.baseline.test
        band = near.axhspan(base - 100 * TOLERANCE, base, color="grey", alpha=0.2, linewidth=0)
        near.legend([band], [f"within {POINTS} of the baseline"], loc="lower left")
        near.set_ylim(base - NEAR, base + NEAR / 4)
    full.legend(loc="lower left")
    figure.suptitle(f"{title}; mean, minimum and maximum over the seeds")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _line(axes: Any, name: str, cells: list[Cell]) -> None:
    means = [100 * cell.test for cell in cells]
    below = [mean - 100 * min(cell.tests) for mean, cell in zip(means, cells, strict=True)]
    above = [100 * max(cell.tests) - mean for mean, cell in zip(means, cells, strict=True)]
    axes.errorbar([cell.batch for cell in cells], means, yerr=[below, above], label=RECIPES[name].title,
                  marker=_MARKS[name], capsize=3, linewidth=1.2)  # fmt: skip
