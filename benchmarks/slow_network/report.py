"""Tables for the terminal and for Markdown, and plots."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.netlab import link
from benchmarks.slow_network import goals
from benchmarks.slow_network.methods import STEPS
from benchmarks.slow_network.model import TITLES
from benchmarks.slow_network.summary import Cell, Rows, cells, reached

Lines = Iterator[list[str]]
METHODS = {method.name: method for method in STEPS}
TIMES = ["step, ms", "min-max (n)"]
STEP_HEAD = ["", *TIMES, "MB sent", "bytes / bandwidth, ms", "vs. fp32 DDP", "vs. fp16 hook"]
TASK_HEAD = ["", "learning rate", "total, s", "ms per step", "MB sent per step", "accuracy", "loss"]
HIERARCHY_HEAD = ["", "link", *TIMES, "MB sent per host", "/ (its bytes / bandwidth)", "/ (gradients / bandwidth)"]


def step_rows(rows: Rows, model: str, rate: str | None) -> Lines:
    found = {method: cell for (method, at), cell in cells(rows, model).items() if at == rate}
    yield STEP_HEAD
    for name, method in METHODS.items():
        if name in found:
            cell = found[name]
            floor = f"{1e3 * cell.floor:,.0f}" if rate else ""
            title = f"`{method.title}`" if method.ours else method.title
            against = [_gain(found.get(peer), cell) for peer in ("ddp", "fp16_hook")] if name != "alone" else ["", ""]
            yield [title, *_times(cell), f"{cell.sent / 1e6:.2f}", floor, *against]


def _times(cell: Cell) -> list[str]:
    range_ = f"{1e3 * min(cell.seconds):,.0f}-{1e3 * max(cell.seconds):,.0f}"
    return [f"{1e3 * cell.step:,.0f}", f"{range_} ({len(cell.seconds)})"]


def _gain(peer: Cell | None, cell: Cell) -> str:
    if peer is None or peer.method == cell.method:
        return ""
    ratio = peer.step / cell.step
    return f"{ratio:.1f} x" if ratio > 1.05 else f"{ratio:.2f} x, no gain"


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
        title = row["title"] + (", learning rate of DDP" if row.get("same_rate") else "")
        yield [title, *figures, *("never" if seconds is None else f"{seconds:.1f}" for seconds in when)]


def hierarchy_rows(rows: Rows) -> Lines:
    yield HIERARCHY_HEAD
    for model in dict.fromkeys(row["model"] for row in rows):
        for (method, rate), cell in sorted(cells(rows, model).items(), key=lambda item: (str(item[0][1]), item[0][0])):
            floors = [cell.floor, 8 * cell.bytes / link.bits(rate)] if rate else []
            ratios = [f"{cell.step / floor:.3f}" for floor in floors] or ["", ""]
            yield [METHODS[method].title, rate or "unshaped", *_times(cell), f"{cell.sent / 1e6:.2f}", *ratios]


def goal_rows(found: list[goals.Goal]) -> Lines:
    yield ["", "reached", "goal", ""]
    for goal in found:
        yield goal.words()


def tables(results: dict[str, Any]) -> Iterator[tuple[str, Lines]]:
    steps = results.get("steps", [])
    for model in dict.fromkeys(row["model"] for row in steps):
        for rate in dict.fromkeys(row["rate"] for row in steps):
            yield f"{TITLES[model]}, {rate or 'unshaped'}", step_rows(steps, model, rate)
    if results.get("task"):
        yield "Fashion-MNIST", task_rows(results["task"])
    if results.get("hierarchy"):
        yield "two hosts with two workers each", hierarchy_rows(results["hierarchy"])
    yield "goals", goal_rows(goals.everything(results))


def as_markdown(lines: Lines) -> str:
    head, *rest = lines
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *rest]) + "\n"


def plots(folder: Path, results: dict[str, Any]) -> None:
    """Raise ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if steps := results.get("steps"):
        models = [*dict.fromkeys(row["model"] for row in steps)]
        figure, axes = pyplot.subplots(1, len(models), figsize=(7 * len(models), 6), squeeze=False)
        for axis, model in zip(axes[0], models, strict=True):
            _bandwidths(axis, steps, model)
        figure.suptitle("step time against bandwidth, two hosts (median, min and max)")
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
    for number, (name, method) in enumerate(METHODS.items()):
        mine = [found[name, rate] for rate in places if (name, rate) in found]
        if mine:
            least = [cell.step - min(cell.seconds) for cell in mine]
            most = [max(cell.seconds) - cell.step for cell in mine]
            style = "k:" if name == "alone" else f"C{number % 10}{'-' if method.ours else '--'}"
            x, y = [places[cell.rate] for cell in mine], [cell.step for cell in mine]
            axis.errorbar(x, y, yerr=[least, most], fmt=style, marker="o", markersize=4, capsize=2, label=method.title)
    axis.set(xscale="log", yscale="log", xlabel="bits per second", ylabel="seconds per step", title=TITLES[model])
    axis.set_xticks([*places.values()], [rate or "unshaped" for rate in places], minor=False)
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
