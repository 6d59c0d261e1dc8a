"""Tables for the terminal and for Markdown, and a plot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.frame import pages
from benchmarks.slow_network.islands.runs import Kept, Plan, left
from benchmarks.slow_network.islands.summary import FEWER, RATE, SLOWER, Cell, Summary, summarised
from benchmarks.slow_network.islands.tasks import TASKS
from benchmarks.slow_network.islands.times import RATES
from benchmarks.slow_network.islands.ways import OURS, WAYS

Lines = list[list[str]]
HEADS = ("ms per step", "/ alone", "/ never", "training, s", "s to dense")
WORDS = {True: "yes", False: "**no**", None: ""}
LINKS = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s"}


def name_of(cell: Cell) -> str:
    return f"`{cell.way.title}`" if cell.way.name in OURS else cell.way.title


def score_rows(summary: Summary) -> Iterator[list[str]]:
    task = TASKS[summary.task]
    yield ["", task.measure, "worst to best (seeds)", "test loss", "as dense", "MB per host", "fewer bytes"]
    for cell in summary.trained:
        range_ = f"{task.shown(min(cell.tests))} to {task.shown(max(cell.tests))} ({len(cell.tests)})"
        loss = "diverged" if cell.loss is None else f"{cell.loss:.4f}"
        fewer = summary.fewer(cell) if not cell.way.alone else None
        keeps = WORDS[summary.keeps(cell)] if cell.way.name != "ddp" else ""
        yield [name_of(cell), task.shown(cell.test), range_, loss, keeps, f"{cell.sent / 1e6:,.3f}", _times(fewer)]


def time_rows(summary: Summary) -> Iterator[list[str]]:
    heads = [f"{LINKS[rate]}: {words}" for rate in RATES for words in HEADS]
    yield ["", *heads]
    for cell in summary.cells:
        if not any(cell.times.values()):
            continue
        figures = []
        for rate in RATES:
            step = cell.step(rate)
            if step is None:
                figures += [""] * len(HEADS)
                continue
            needed = summary.steps_to_target(cell)
            reached = "never" if needed is None else f"{needed * step:.1f}"
            ratios = [summary.slower(cell, rate, than) for than in ("alone", "apart")]
            shown = [f"{ratio:.2f}" if ratio else "" for ratio in ratios]
            figures += [f"{1e3 * step:.1f}", *shown, f"{summary.steps * step:.1f}", reached]
        yield [name_of(cell), *figures]


def goal_rows(summaries: Sequence[Summary]) -> Iterator[list[str]]:
    """All of ours, with what each reached."""
    limits = [
        "as dense",
        f"at least {FEWER} times fewer bytes",
        f"at most {SLOWER} of no communication at {LINKS[RATE]}",
    ]
    yield ["", "task", *limits]
    for summary in summaries:
        for cell in summary.trained:
            if cell.way.name in OURS:
                fewer, slower = _times(summary.fewer(cell)), summary.slower(cell, RATE)
                shown = [TASKS[summary.task].shown(cell.test), fewer, f"{slower:.2f}" if slower else "not timed"]
                marks = [{True: "", False: ", **not met**", None: ""}[met] for met in summary.met(cell)]
                yield [name_of(cell), TASKS[summary.task].title, *(a + b for a, b in zip(shown, marks, strict=True))]


def setting_rows(plan: Plan, summary: Summary, kept: Kept) -> Iterator[list[str]]:
    """Everything that was tried."""
    yield ["", "settings: held-out score of seed 0", "chosen"]
    for cell in summary.trained:
        tried = [
            f"{_settings(run.settings)}: {TASKS[run.task].shown(kept.outcomes[run].chosen_on)}"
            for run in plan.search(summary.task, cell.way.name)
        ]
        yield [name_of(cell), "; ".join(tried), _settings(cell.run.settings)]


def _settings(settings: Sequence[tuple[str, float]]) -> str:
    found = dict(settings)
    outer = [f"{found[key]:g}" for key in ("outer_lr", "outer_momentum") if key in found]
    return ", ".join([f"{found['rate']:g}", *outer])


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f} x" if value >= 10 else f"{value:.1f} x"


def tables(plan: Plan, kept: Kept) -> Iterator[tuple[str, Lines]]:
    summaries = [summarised(plan, kept, task) for task in plan.steps]
    yield "goals", [*goal_rows(summaries)]
    for summary in summaries:
        title = TASKS[summary.task].title
        yield f"{title}: scores and bytes", [*score_rows(summary)]
        if summary.task not in plan.settings_of:  # the same steps, with the same settings
            yield f"{title}: times", [*time_rows(summary)]
            yield f"{title}: settings", [*setting_rows(plan, summary, kept)]


def as_markdown(lines: Lines) -> str:
    head, *rest = lines
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *rest]) + "\n"


def show(plan: Plan, runs: Path, out: Path) -> None:
    kept, console = Kept(runs), Console()
    console = Console(width=max(console.width, 150))
    if not kept.outcomes:
        console.print(f"{runs} has no finished runs, so nothing is written", highlight=False, soft_wrap=True)
        return
    found = dict(tables(plan, kept))
    for title, (head, *rest) in found.items():
        table = Table(title=title, title_justify="left")
        for i, column in enumerate(head):
            table.add_column(column, justify="left" if i == 0 else "right")
        for line in rest:
            table.add_row(*line)
        console.print(table)
    console.print(f"{len(kept.outcomes)} trainings and {len(kept.timings)} timings; "
                  f"{left(plan, kept.outcomes)} trainings are left", highlight=False)  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    pages.publish("islands", {title: as_markdown(lines) for title, lines in found.items()}, out)
    try:
        plot(out / "islands.png", [summarised(plan, kept, task) for task in plan.steps])
    except ImportError:
        console.print("no plot, because matplotlib is not installed: pip install matplotlib")
    console.print(f"results are in {out}", highlight=False)


def plot(path: Path, summaries: Sequence[Summary]) -> None:
    """Score against bytes. Raise ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(summaries), figsize=(7 * len(summaries), 6.5), squeeze=False)
    for axis, summary in zip(axes[0], summaries, strict=True):
        _scores(axis, summary)
    figure.suptitle("two islands of two ranks: test score against bytes (mean, worst and best over the seeds)")
    shown = {label: handle for axis in axes[0] for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(shown.values(), shown, loc="lower center", ncols=4, fontsize=9)
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _scores(axis: Any, summary: Summary) -> None:
    task = TASKS[summary.task]
    value = (lambda score: 100 * score) if task.measure == "accuracy" else (lambda score: float(task.shown(score)))
    ways = [way.name for way in WAYS if not (way.alone or way.apart)]
    for cell in summary.trained:
        if cell.way.alone:
            continue
        number = ways.index(cell.way.name)
        middle = value(cell.test)
        ends = sorted((value(min(cell.tests)), value(max(cell.tests))))
        marker = "os"[number // 10] if cell.way.name in OURS else "x+"[number // 10]
        axis.errorbar([summary.fewer(cell) or 1.0], [middle], [[middle - ends[0]], [ends[1] - middle]], capsize=3,
                      marker=marker, markersize=7, color=f"C{number % 10}", linestyle="none",
                      label=cell.way.title)  # fmt: skip
    if dense := summary.at("ddp"):
        axis.axhspan(
            value(min(dense.tests)), value(max(dense.tests)), color="grey", alpha=0.2, linewidth=0, label="dense"
        )
    axis.axvline(FEWER, color="black", linestyle=":", linewidth=1)
    unit = ", %" if task.measure == "accuracy" else " (lower is better)"
    axis.set(xscale="log", xlabel="times fewer bytes between the hosts than DDP", ylabel=f"test {task.measure}{unit}",
             title=task.title)  # fmt: skip
    axis.grid(alpha=0.3)
