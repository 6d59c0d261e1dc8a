"""python -m benchmarks.large_batch: train, print the tables, plot."""

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
        found = [int(x) for x in value.split(",")] if value else None
    except ValueError:
        raise click.BadParameter("numbers with commas between them, please") from None
    if found and any(x < SMALLEST or x % SMALLEST for x in found):
        raise click.BadParameter(f"a batch is a multiple of {SMALLEST}, which is one step of the workers")
    return sorted(found) if found else None


def names(context: click.Context, option: click.Parameter, value: str | None) -> list[str] | None:
    found = value.split(",") if value else None
    if found and (unknown := [x for x in found if x not in RECIPES]):
        raise click.BadParameter(f"there is no {unknown[0]!r}; there are {', '.join(RECIPES)}")
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="A pass of a few minutes: one rate, one seed, a quarter of the epochs.")
@click.option("--optimizers", callback=names, help=f"Some of {','.join(RECIPES)}, in the order of their runs.")
@click.option("--batches", callback=numbers, help="Such as 256,4096,32768.")
@click.option("--epochs", type=click.IntRange(min=1))
@click.option("--seeds", type=click.IntRange(min=1), help="Runs of each optimizer and batch at its chosen rate.")
@click.option("--hold-out", type=click.IntRange(min=1), default=HELD, show_default=True,
              help="Training images that choose the rates instead.")  # fmt: skip
@click.option("--minutes", type=float, default=110, show_default=True, help="No run begins after so many.")
@click.option("--data", "folder", type=click.Path(path_type=Path), default=data.FOLDER, show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="The folder for all files.  [default: benchmarks/out/large_batch, quick/ in it]",
)
@click.option("--report", "only_report", is_flag=True, help="Train nothing; show what the folder has.")
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
    """Accuracy against batch at the same number of epochs: SGD, AdamW, LARS and LAMB, each with its rate searched for.

    Two workers on the CPU; gradient merge makes the batch. Finished runs are kept in OUT and never repeated.
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
    """The study in its workers, by fleetrun, which echoes the first and says what failed."""
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
    mark = " (quick: one untuned rate, no finding)" if quick else ""
    if missing := left(plan, kept.outcomes):
        mark += f" (incomplete: {missing} runs or more are missing)"
    console.print(report.as_table(f"test accuracy after {plan.epochs} epochs{mark}", report.rows(plan, summary)))
    console.print(report.as_table("the largest batch", report.largest_rows(plan, summary)))
    console.print(report.as_table("rates", report.rate_rows(plan, summary)))
    report.write(out, plan, summary, notes | {"incomplete": bool(missing)})
    try:
        report.plot(out / "large_batch.png", plan, summary, f"Fashion-MNIST, {plan.epochs} epochs{mark}")
    except ImportError:
        console.print("no plot: matplotlib is not installed (pip install matplotlib)")
    console.print(f"all of it is in {out}", highlight=False)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.large_batch")
