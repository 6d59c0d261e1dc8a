"""python -m benchmarks.paddle_agreement: compare, print a table, exit with 1 on any disagreement."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.frame import machine
from benchmarks.paddle_agreement import ours
from benchmarks.paddle_agreement.compare import PaddleSideError, Row, run

PADDLE = "paddlepaddle==3.3.1"
TOLERANCE = 1e-5

console = Console(highlight=False, width=120)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--paddle-python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"An interpreter that has {PADDLE}. By default, creates a venv in a temporary folder and removes it again: "
    "about 200 MB to download, 900 MB on disk, a minute or more.",
)
@click.option("--steps", type=click.IntRange(min=3), default=40, show_default=True)
@click.option("--tolerance", type=float, default=TOLERANCE, show_default=True, help="The largest difference allowed.")
def main(paddle_python: Path | None, steps: int, tolerance: float) -> None:
    """Compare fleetx.optim with PaddlePaddle's kernels and with the formulas in float64."""
    with tempfile.TemporaryDirectory(prefix="paddle_agreement_") as folder:
        python = paddle_python.absolute() if paddle_python else _install(Path(folder) / "venv")
        try:
            version, rows, rates = run(python, Path(folder), steps)
        except PaddleSideError as error:
            raise click.ClickException(f"{python} failed: {error}") from None
    here = machine.machine()
    console.print(
        f"PaddlePaddle {version}, torch {here['torch']}, {here['cpu']}, {steps} steps, tolerance {tolerance:g}"
    )
    console.print(f"fleetx: the worst of its kernels ({', '.join(ours.kernels())})")
    console.print(_table(rows, tolerance))
    console.print(f"linear_warmup_decay: differs by {rates:.1e} of its peak")
    wrong = [row.case.name for row in rows if not row.agrees(tolerance)] + ["linear_warmup_decay"] * (rates > tolerance)
    console.print(f"disagreement in: {', '.join(wrong)}" if wrong else "all agree")
    sys.exit(bool(wrong))


def _table(rows: list[Row], tolerance: float) -> Table:
    table = Table("case", "Paddle - formula", "fleetx - formula", "fleetx - Paddle", "verdict", box=None)
    for row in rows:
        numbers = [f"{x:.1e}" if x else "0" for x in (row.paddle_formula, row.ours_formula, row.ours_paddle)]
        fine = f"known: {row.case.differs}" if row.case.differs else "agrees"
        table.add_row(row.case.name, *numbers, fine if row.agrees(tolerance) else "DISAGREES")
    return table


def _install(folder: Path) -> Path:
    console.print(
        f"installing {PADDLE} into {folder}, which takes a minute or more (--paddle-python uses an existing one)"
    )
    start = time.monotonic()
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", PADDLE, "numpy", "setuptools"], check=True)
    console.print(f"installed in {time.monotonic() - start:.0f} s")
    return python


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.paddle_agreement")
