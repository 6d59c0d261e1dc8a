"""python -m benchmarks.large_batch: train, print tables, plot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console

from benchmarks.frame import machine
from benchmarks.large_batch import data, report
from benchmarks.large_batch.recipe import RECIPES, SMALLEST, WORKERS
from benchmarks.large_batch.runs import Kept
from benchmarks.large_batch.summary import summarised
from benchmarks.large_batch.sweep import Plan, left

ROOT = Path(__file__).parents[2]
OUT = Path(__file__).parents[1] / "out" / "large_batch"
HELD = 10_000
FULL = Plan(optimizers=[*RECIPES], batches=[256, 1024, 4096, 16384, 32768], epochs=16, seeds=3, hold_out=HELD)
QUICK = Plan(
    optimizers=[*RECIPES], batches=[256, 4096, 32768], epochs=4, seeds=1, hold_out=HELD, steps=[0], extensions=0
)


def numbers(context: click.Context, option: click.Parameter, value: str | None) -> list[int] | None:
    try:
        batches = [int(x) for x in value.split(",")] if value else None
    except ValueError:
        raise click.BadParameter("must be integers separated by commas") from None
    if batches and any(x < SMALLEST or x % SMALLEST for x in batches):
        raise click.BadParameter(f"each batch must be a multiple of {SMALLEST}, the samples in one step of the workers")
    return sorted(batches) if batches else None


def names(context: click.Context, option: click.Parameter, value: str | None) -> list[str] | None:
    optimizers = value.split(",") if value else None
    if optimizers and (unknown := [x for x in optimizers if x not in RECIPES]):
        raise click.BadParameter(f"unknown optimizer {unknown[0]!r}: must be one of {', '.join(RECIPES)}")
    return optimizers


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Takes a few minutes: one rate, one seed, a quarter of the epochs.")
@click.option("--optimizers", callback=names, help=f"A subset of {','.join(RECIPES)}, in the order to run them.")
@click.option("--batches", callback=numbers, help="For example 256,4096,32768.")
@click.option("--epochs", type=click.IntRange(min=1))
@click.option("--seeds", type=click.IntRange(min=1), help="Runs per optimizer and batch at the chosen rate.")
@click.option("--hold-out", type=click.IntRange(min=1), default=HELD, show_default=True,
              help="Training images to hold out for choosing the rates.")  # fmt: skip
@click.option("--minutes", type=float, default=110, show_default=True, help="Start no run after this time.")
@click.option("--data", "folder", type=click.Path(path_type=Path), default=data.FOLDER, show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="The folder for all files.  [default: benchmarks/out/large_batch, or quick/ in it]",
)
@click.option("--report", "only_report", is_flag=True, help="Do not train; show the results in the folder.")
def main(
    quick: bool,
    optimizers: list[str] | None,
    batches: list[int] | None,
    epochs: int | None,
    seeds: int | None,
    hold_out: int,
    minutes: float,
    folder: Path,
    out: Path | None,
    only_report: bool,
) -> None:
    """Accuracy against batch size at the same number of epochs: SGD, AdamW, LARS and LAMB, each with a tuned rate.

    Uses two workers on the CPU, and gradient merge for the batch. Finished runs are stored in OUT and not repeated.
    """
    if not only_report and (reason := data.missing(folder)):
        raise click.ClickException(reason)
    base = QUICK if quick else FULL
    plan = Plan(optimizers or base.optimizers, batches or base.batches, epochs or base.epochs, seeds or base.seeds,
                hold_out, base.steps, base.extensions)  # fmt: skip
    out = out or (OUT / "quick" if quick else OUT)
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.jsonl"
    asked = {
        "plan": asdict(plan),
        "data": str(folder.absolute()),
        "results": str(results.absolute()),
        "minutes": minutes,
    }
    before = machine.load()
    code = 0 if only_report else start(asked, out)
    show(plan, results, out, notes(before, quick=quick), quick=quick)
    sys.exit(code)


def start(asked: dict[str, object], out: Path) -> int:
    """Run the study with fleetrun, which echoes the first worker and reports failures."""
    with tempfile.TemporaryDirectory(prefix="large_batch-") as folder:
        request = Path(folder) / "request.json"
        request.write_text(json.dumps(asked))
        command = [sys.executable, "-m", "fleetx.launch", "--device", "cpu", "--nproc_per_node", str(WORKERS)]
        command += ["--log_dir", str(out / "log"), "-m", "benchmarks.large_batch.worker", str(request)]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        return subprocess.run(command, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}).returncode


def notes(load_before: list[float], *, quick: bool) -> dict[str, object]:
    return {
        "quick": quick,
        "machine": machine.machine(),
        "load_before": load_before,
        "load_after": machine.load(),
        "commit": machine.commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def show(plan: Plan, results: Path, out: Path, notes: dict[str, object], *, quick: bool) -> None:
    console = Console()
    kept = Kept(results)
    summary = summarised(plan, kept.outcomes)
    mark = " (quick: one untuned rate, not a result)" if quick else ""
    if missing := left(plan, kept.outcomes):
        mark += f" (incomplete: at least {missing} runs are missing)"
    console.print(report.as_table(f"test accuracy after {plan.epochs} epochs{mark}", report.rows(plan, summary)))
    console.print(report.as_table("the largest batch", report.largest_rows(plan, summary)))
    console.print(report.as_table("rates", report.rate_rows(plan, summary)))
    report.write(out, plan, summary, notes | {"incomplete": bool(missing)})
    try:
        report.plot(out / "large_batch.png", plan, summary, f"Fashion-MNIST, {plan.epochs} epochs{mark}")
    except ImportError:
        console.print("no plot, because matplotlib is not installed (pip install matplotlib)")
    console.print(f"all files are in {out}", highlight=False)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.large_batch")
