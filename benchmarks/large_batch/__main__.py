"""python -m benchmarks.large_batch: train, print tables, plot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import click
from rich.console import Console

from benchmarks.frame import pages
from benchmarks.large_batch import data, report
from benchmarks.large_batch.recipe import RECIPES
from benchmarks.large_batch.runs import Kept
from benchmarks.large_batch.summary import summarised
from benchmarks.large_batch.sweep import Plan, left
from benchmarks.large_batch.tasks import SHARES, TASKS

ROOT = Path(__file__).parents[2]
OUT = Path(__file__).parents[1] / "out" / "large_batch"
KEPT = ROOT / "docs" / "results" / "large_batch_runs.jsonl"  # committed, so that any machine can continue
SEEDS = 5


def shares(context: click.Context, option: click.Parameter, value: str | None) -> list[float] | None:
    try:
        found = [float(x) / 100 for x in value.split(",")] if value else None
    except ValueError:
        raise click.BadParameter("must be numbers separated by commas") from None
    if found and not all(0 < x <= 1 for x in found):
        raise click.BadParameter("each share must be above 0 and at most 100 %")
    return sorted(found) if found else None


def names(context: click.Context, option: click.Parameter, value: str | None) -> list[str] | None:
    known = TASKS if option.name == "tasks" else RECIPES
    found = value.split(",") if value else None
    if found and (unknown := [x for x in found if x not in known]):
        raise click.BadParameter(f"unknown {str(option.name)[:-1]} {unknown[0]!r}: must be one of {', '.join(known)}")
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Takes minutes: one rate, one decay, one seed, two epochs, two shares.")
@click.option("--tasks", callback=names, help=f"A subset of {','.join(TASKS)}.")
@click.option("--optimizers", callback=names, help=f"A subset of {','.join(RECIPES)}, in the order to run them.")
@click.option("--shares", callback=shares, help="Percent of the data per update, for example 0.5,2.5,5.")
@click.option("--epochs", type=click.IntRange(min=1))
@click.option("--samples", type=click.IntRange(min=1), help="How many samples to train with.")
@click.option("--seeds", type=click.IntRange(min=1), help="Runs per optimizer and share with the chosen settings.")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True,
              help="On the CPU, one thread each. The networks are so small that one worker is fastest per core.",
              )  # fmt: skip
@click.option("--minutes", type=float, default=110, show_default=True, help="Start no run after this time.")
@click.option("--data", "folder", type=click.Path(path_type=Path), default=data.FOLDER, show_default=True)
@click.option("--runs", type=click.Path(path_type=Path, dir_okay=False),
              help="The file of finished runs.  [default: the committed one; with --quick, OUT/runs.jsonl]",
              )  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path),
              help="The folder for tables and the plot.  [default: benchmarks/out/large_batch, or quick/ in it]",
              )  # fmt: skip
@click.option("--report", "only_report", is_flag=True, help="Do not train; show what the file of runs has.")
def main(
    quick: bool,
    tasks: list[str] | None,
    optimizers: list[str] | None,
    shares: list[float] | None,
    epochs: int | None,
    samples: int | None,
    seeds: int | None,
    workers: int,
    minutes: float,
    folder: Path,
    runs: Path | None,
    out: Path | None,
    only_report: bool,
) -> None:
    """Accuracy and perplexity against the share of the data per update, at equal epochs, for five optimizers.

    Rate, decay and warm-up are tuned for each, with the same budget. Uses gradient merge for the batch. Finished
    runs are appended to a file and not repeated: the study can be run in pieces, and both tasks at the same time.
    """
    chosen = tasks or [*TASKS]
    for name in chosen:
        if not only_report and (reason := TASKS[name].missing(folder)):
            raise click.ClickException(reason)
    plans = [plan(name, optimizers, shares, epochs, samples, seeds, quick=quick) for name in chosen]
    out = out or (OUT / "quick" if quick else OUT)
    out.mkdir(parents=True, exist_ok=True)
    runs = runs or (out / "runs.jsonl" if quick else KEPT)
    asked = {
        "plans": [asdict(p) for p in plans],
        "data": str(folder.absolute()),
        "results": str(runs.absolute()),
        "minutes": minutes,
    }
    code = 0 if only_report else start(asked, out / "log" / "_".join(chosen), workers)
    show(plans, runs, out, quick=quick)
    sys.exit(code)


def plan(
    name: str,
    optimizers: list[str] | None,
    shares: list[float] | None,
    epochs: int | None,
    samples: int | None,
    seeds: int | None,
    *,
    quick: bool,
) -> Plan:
    task = TASKS[name]
    full = Plan(
        name, optimizers or [*RECIPES], shares or SHARES, epochs or task.epochs, seeds or SEEDS, samples or task.samples
    )
    if not quick:
        return full
    return replace(
        full, shares=shares or [SHARES[0], SHARES[2]], epochs=epochs or 2, seeds=seeds or 1, steps=[0], extensions=0,
        decays=[], short_warmups=False,
    )  # fmt: skip


def start(asked: dict[str, object], log: Path, workers: int) -> int:
    """Run the study with fleetrun, which echoes the first worker and reports failures."""
    with tempfile.TemporaryDirectory(prefix="large_batch-") as folder:
        request = Path(folder) / "request.json"
        request.write_text(json.dumps(asked))
        command = [sys.executable, "-m", "fleetx.launch", "--device", "cpu", "--nproc_per_node", str(workers)]
        command += ["--log_dir", str(log), "-m", "benchmarks.large_batch.worker", str(request)]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.run(command, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}).returncode


def show(plans: Sequence[Plan], runs: Path, out: Path, *, quick: bool) -> None:
    console = Console()
    kept = Kept(runs)
    studies = [(plan, summarised(plan, kept.outcomes)) for plan in plans]
    if not any(summary.cells for _, summary in studies):
        console.print(f"{runs} has no runs of this study, so nothing is written", highlight=False, soft_wrap=True)
        return
    mark = " (quick: untuned, not a result)" if quick else ""
    if missing := sum(left(plan, kept.outcomes) for plan in plans):
        mark += f" (incomplete: at least {missing} runs are missing)"
    tables = dict(report.tables(studies, kept))
    for title, lines in tables.items():
        console.print(report.as_table(title + mark, lines))
    try:
        pages.publish("large_batch", {title: report.as_markdown(lines) for title, lines in tables.items()}, out)
    except pages.CannotWriteError as reason:
        raise click.ClickException(f"large_batch.md stays as it is: {reason}") from None
    report.write(out / "large_batch.json", studies, kept, quick=quick)
    try:
        report.plot(out / "large_batch.png", studies, mark)
    except ImportError:
        console.print("no plot, because matplotlib is not installed (pip install matplotlib)")
    console.print(f"all files are in {out}", highlight=False)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.large_batch")
