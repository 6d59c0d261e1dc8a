"""python -m benchmarks.recompute: measure, print the tables, plot."""

from __future__ import annotations

import gc
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.frame import CannotRunError, machine, pages
from benchmarks.recompute import batches, compiled, report, trade

OUT = Path(__file__).parents[1] / "out" / "recompute"
PARTS = ("trade", "batches", "compiled")
LARGEST = ["bert_large", "resnet", "bert"]
TRADED = ["resnet", "bert", "gpt2", "vit"]


def _chosen(context: click.Context, option: click.Parameter, value: str | None) -> list[str]:
    found = value.split(",") if value else list(PARTS)
    if unknown := [x for x in found if x not in PARTS]:
        raise click.BadParameter(f"{unknown[0]!r} is unknown: use {', '.join(PARTS)}")
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--only", callback=_chosen, help=f"Run only some of {','.join(PARTS)}.")
@click.option("--models", help="Run only these models, such as resnet,bert.")
@click.option("--memory", default="7GiB", show_default=True, help="Memory limit for the largest batch.")
@click.option("--rounds", default=4, show_default=True, help="Timed steps per method.")
@click.option("--out", type=click.Path(path_type=Path), default=OUT, help="Output folder.")
@click.option("--report", "only_report", is_flag=True, help="Measure nothing; show what is in the folder.")
def main(only: list[str], models: str | None, memory: str, rounds: int, out: Path, only_report: bool) -> None:
    """Compare recomputation with a memory budget to torch's own methods. Takes half an hour on two idle cores."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "recompute.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for part in [] if only_report else only:
        begun = {"load_before": machine.load(), "allocator": _allocator(), "commit": machine.commit(),
                 "threads": torch.get_num_threads()}  # fmt: skip
        try:
            names = _names(part, models)
            results[part] = [row for row in results.get(part, []) if row.get("model") not in (*names, None)]
            for row in _rows(part, names, memory, rounds):
                results[part].append(_shown(row))
                file.write_text(json.dumps(results, indent=1) + "\n")  # after every row, in case it is stopped
        except CannotRunError as error:
            raise click.ClickException(str(error)) from None
        notes = results.setdefault("notes", {"machine": machine.machine()})
        ended = {"load_after": machine.load(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
        notes[" ".join((part, *names))] = begun | ended
        file.write_text(json.dumps(results, indent=1) + "\n")
    show(results, out)


def _names(part: str, models: str | None) -> list[str]:
    if part == "compiled":
        return []
    return models.split(",") if models else LARGEST if part == "batches" else TRADED


def _rows(part: str, names: list[str], memory: str, rounds: int) -> Any:
    if part == "compiled":
        yield from compiled.rows(max(rounds, 8))
    for name in names:
        yield from batches.rows(name, memory) if part == "batches" else trade.rows(name, rounds)
        gc.collect()


def _allocator() -> str:
    """Which allocator torch uses: it decides how often a step waits for fresh pages."""
    preloaded = [Path(name).name for name in os.environ.get("LD_PRELOAD", "").split(":") if name]
    return " ".join(preloaded + [f"{k}={v}" for k, v in os.environ.items() if k.startswith("MALLOC_")]) or "glibc"


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """Print a row as soon as it is measured."""
    what = row.get("title") or row.get("setting")
    seconds = " ".join(f"{s:.2f}" for s in row["seconds"])
    print(f"{row.get('model', '')} {what}: {row['peak'] / 2**20:,.1f} MiB, {seconds} s", flush=True)
    return row


def show(results: dict[str, Any], out: Path) -> None:
    console = Console()
    console = Console(width=max(console.width, 150))
    tables = {}
    for title, (head, *rest) in report.tables(results):
        table = Table(title=title, title_justify="left")
        for i, word in enumerate(head):
            table.add_column(word, justify="left" if i == 0 else "right")
        for line in rest:
            table.add_row(*line)
        console.print(table)
        tables[title] = report.as_markdown([head, *rest])
    pages.publish("recompute", tables, out)
    try:
        if results.get("trade"):
            report.plot(out, results)
    except ImportError:
        console.print("no plot: matplotlib is not installed (pip install matplotlib)")
    console.print(f"results: {out}", highlight=False)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.recompute")
