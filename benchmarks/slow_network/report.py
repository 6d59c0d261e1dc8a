"""Tables for the terminal and for a page, and plots."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.netlab import link
from benchmarks.slow_network import goals
from benchmarks.slow_network.model import TITLES
from benchmarks.slow_network.summary import Cell, Rows, cells, reached
from benchmarks.slow_network.ways import STEPS

Lines = Iterator[list[str]]
WAYS = {way.name: way for way in STEPS}
TIMES = ["step, ms", "least-most (n)"]
STEP_HEAD = ["", *TIMES, "MB sent", "bytes / bandwidth, ms", "against fp32 DDP", "against fp16 hook"]
TASK_HEAD = ["", "learning rate", "whole run, s", "ms a step", "MB sent a step", "accuracy", "loss"]
HIERARCHY_HEAD = ["", "link", *TIMES, "MB sent by a host", "/ (its bytes / bandwidth)", "/ (gradients / bandwidth)"]


def step_rows(rows: Rows, model: str, rate: str | None) -> Lines:
    """A strategy that does not pay at this rate says so."""
    found = {way: cell for (way, at), cell in cells(rows, model).items() if at == rate}
    yield STEP_HEAD
    for name, way in WAYS.items():
        if name in found:
            cell = found[name]
            floor = f"{1e3 * cell.floor:,.0f}" if rate else ""
            title = f"`{way.title}`" if way.ours else way.title
            against = [_gain(found.get(peer), cell) for peer in ("ddp", "fp16_hook")] if name != "alone" else ["", ""]
            yield [title, *_times(cell), f"{cell.sent / 1e6:.2f}", floor, *against]


def _times(cell: Cell) -> list[str]:
    range_ = f"{1e3 * min(cell.seconds):,.0f}-{1e3 * max(cell.seconds):,.0f}"
    return [f"{1e3 * cell.step:,.0f}", f"{range_} ({len(cell.seconds)})"]


def _gain(peer: Cell | None, cell: Cell) -> str:
    if peer is None or peer.way == cell.way:
        return ""
    ratio = peer.step / cell.step
    return f"{ratio:.1f} x" if ratio > 1.05 else f"{ratio:.2f} x, does not pay"


def task_rows(rows: Rows) -> Lines:
    by_name = {row["way"]: row for row in rows}
    accuracy, loss = (goals.target_accuracy(rows), goals.target_loss(rows)) if "ddp" in by_name else (1.0, 0.0)
    yield [*TASK_HEAD, f"s to {accuracy:.2%}", f"s to loss {loss:.3f}"]
    for row in sorted(rows, key=lambda row: row["moments"][-1]["seconds"]):
        last = row["moments"][-1]
        when = [reached(row, "accuracy", accuracy), reached(row, "loss", loss)]
        rate = f"{row['learning_rate']:g}"
        figures = [rate, f"{last['seconds']:.1f}", f"{1e3 * last['seconds'] / last['step']:.0f}"]
        figures += [
            f"{row['sent'] / 1e6:.3f}",
            f"{last['accuracy']:.2%}",
            "diverged" if last["loss"] is None else f"{last['loss']:.4f}",
        ]
        title = row["title"] + (", at the rate of dense" if row.get("same_rate") else "")
        yield [title, *figures, *("never" if seconds is None else f"{seconds:.1f}" for seconds in when)]


def hierarchy_rows(rows: Rows) -> Lines:
    yield HIERARCHY_HEAD
    for model in dict.fromkeys(row["model"] for row in rows):
        for (way, rate), cell in sorted(cells(rows, model).items(), key=lambda item: (str(item[0][1]), item[0][0])):
            floors = [cell.floor, 8 * cell.bytes / link.bits(rate)] if rate else []
            ratios = [f"{cell.step / floor:.3f}" for floor in floors] or ["", ""]
            yield [WAYS[way].title, rate or "not shaped", *_times(cell), f"{cell.sent / 1e6:.2f}", *ratios]


def goal_rows(found: list[goals.Goal]) -> Lines:
    yield ["", "reached", "goal", ""]
    for goal in found:
        yield goal.words()


def tables(results: dict[str, Any]) -> Iterator[tuple[str, Lines]]:
    steps = results.get("steps", [])
    for model in dict.fromkeys(row["model"] for row in steps):
        for rate in dict.fromkeys(row["rate"] for row in steps):
            yield f"{TITLES[model]}, {rate or 'not shaped'}", step_rows(steps, model, rate)
    if results.get("task"):
        yield "Fashion-MNIST", task_rows(results["task"])
    if results.get("hierarchy"):
        yield "two hosts of two workers", hierarchy_rows(results["hierarchy"])
    yield "goals", goal_rows(goals.everything(results))


def as_markdown(lines: Lines) -> str:
    head, *rest = lines
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *rest]) + "\n"


def plots(folder: Path, results: dict[str, Any]) -> None:
    """Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if steps := results.get("steps"):
        models = [*dict.fromkeys(row["model"] for row in steps)]
        figure, axes = pyplot.subplots(1, len(models), figsize=(7 * len(models), 6), squeeze=False)
        for axis, model in zip(axes[0], models, strict=True):
            _bandwidths(axis, steps, model)
        figure.suptitle("time of a step against bandwidth, two hosts (median; least and most)")
        _save(pyplot, figure, folder / "slow_network.png")
    if task := results.get("task"):
        figure, axis = pyplot.subplots(figsize=(9, 6))
        for number, row in enumerate(task):
            seconds = [max(m["seconds"], 0.1) for m in row["moments"]]
            style = ("-", "--", ":")[number // 10 % 3]
            axis.plot(seconds, [100 * m["accuracy"] for m in row["moments"]], style, label=row["title"], linewidth=1.3)
        best = 100 * max(m["accuracy"] for row in task for m in row["moments"])
        axis.set(xscale="log", xlabel="seconds", ylabel="test accuracy, %", ylim=(best - 12, best + 0.5),
                 title=f"Fashion-MNIST, two hosts at {task[0]['rate']}")  # fmt: skip
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=8)
        _save(pyplot, figure, folder / "slow_network_task.png")


def _bandwidths(axis: Any, rows: Rows, model: str) -> None:
    found = cells(rows, model)
    rates = sorted({rate for _, rate in found if rate}, key=link.bits)
    places: dict[str | None, float] = {rate: link.bits(rate) for rate in rates}
    places[None] = 10 * max(places.values(), default=1e9)
    for number, (name, way) in enumerate(WAYS.items()):
        mine = [found[name, rate] for rate in places if (name, rate) in found]
        if mine:
            least = [cell.step - min(cell.seconds) for cell in mine]
            most = [max(cell.seconds) - cell.step for cell in mine]
            style = "k:" if name == "alone" else f"C{number % 10}{'-' if way.ours else '--'}"
            x, y = [places[cell.rate] for cell in mine], [cell.step for cell in mine]
            axis.errorbar(x, y, yerr=[least, most], fmt=style, marker="o", markersize=4, capsize=2, label=way.title)
    axis.set(xscale="log", yscale="log", xlabel="bits a second", ylabel="seconds a step", title=TITLES[model])
    axis.set_xticks([*places.values()], [rate or "not shaped" for rate in places], minor=False)
    axis.minorticks_off()
    low, high = axis.get_ylim()
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [t for power in powers for t in (10.0**power, 3 * 10.0**power) if low <= t <= high]
    axis.set_yticks(ticks, [f"{t:g}" for t in ticks])
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
