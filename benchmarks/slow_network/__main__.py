"""python -m benchmarks.slow_network: measure, print tables and plot."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.frame import CannotRunError, machine, pages
from benchmarks.netlab import LabError
from benchmarks.slow_network import report, steps, study, task
from benchmarks.slow_network.islands import command
from benchmarks.slow_network.islands import report as islands

OUT = Path(__file__).parents[1] / "out" / "slow_network"
FLAT = ["ddp", "dense", "hierarchical"]
# Without a hierarchy, dense equals ddp.
TWO = [method.name for method in steps.STEPS if method.name not in ("dense", "hierarchical")]
FULL = {
    "steps": steps.Plan({"resnet": 3, "bert": 2}, ["100mbit", "1gbit", None], methods=TWO),
    "hierarchy": steps.Plan({"resnet": 2}, ["100mbit", "1gbit", None], methods=FLAT),
    "task": task.Plan(),
}
QUICK = {
    "steps": steps.Plan({"resnet": 1}, ["1gbit", None], methods=TWO),
    "hierarchy": steps.Plan({"resnet": 1}, ["1gbit", None], methods=FLAT),
    "task": task.Plan(steps=129, rate="1gbit", methods=["ddp", "power4", "dgc16", "local8", "local8_overlap"]),
}
TOGETHER = 6  # methods per set of processes
MODULES = {"steps": "steps", "hierarchy": "steps", "task": "task"}
ISLANDS = ["islands", "islands_times"]  # on request only; they resume


def names(context: click.Context, option: click.Parameter, value: str | None) -> list[str]:
    chosen = value.split(",") if value else [*FULL]
    if unknown := [x for x in chosen if x not in [*FULL, *ISLANDS]]:
        raise click.BadParameter(f"unknown measurement {unknown[0]!r}: choose from {', '.join([*FULL, *ISLANDS])}")
    return chosen


def models(context: click.Context, option: click.Parameter, value: str | None) -> list[str]:
    known = [*FULL["steps"].blocks]
    chosen = value.split(",") if value else known
    if unknown := [x for x in chosen if x not in known]:
        raise click.BadParameter(f"unknown model {unknown[0]!r}: choose from {', '.join(known)}")
    return chosen


def ways(context: click.Context, option: click.Parameter, value: str | None) -> list[str]:
    chosen = value.split(",") if value else [*command.PLAN.ways]
    if unknown := [x for x in chosen if x not in command.PLAN.ways]:
        raise click.BadParameter(f"unknown method {unknown[0]!r}: choose from {', '.join(command.PLAN.ways)}")
    return chosen


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--quick", is_flag=True, help="Take a few minutes: only ResNet-50, 1 Gbit/s, one block and a short task.")
@click.option("--only", callback=names, help=f"Comma-separated list from {', '.join([*FULL, *ISLANDS])}.")
@click.option("--models", callback=models, help="Steps only: resnet or bert; the rows of the other stay in OUT.")
@click.option("--out", type=click.Path(path_type=Path),
              help="Output folder.  [default: benchmarks/out/slow_network, or quick/ in it]")  # fmt: skip
@click.option("--report", "only_report", is_flag=True, help="Only report the results in the output folder.")
@click.option("--minutes", type=click.FloatRange(0, 55), default=50, show_default=True,
              help="Islands only: start no run after this time.")  # fmt: skip
@click.option("--ways", callback=ways, help="Islands only: methods, comma-separated.  [default: all]")
@click.option("--runs", type=click.Path(path_type=Path, dir_okay=False), default=command.KEPT,
              help="Islands only: the file of finished runs.  [default: the committed one]")  # fmt: skip
def main(
    quick: bool,
    only: list[str],
    models: list[str],
    out: Path | None,
    only_report: bool,
    minutes: float,
    ways: list[str],
    runs: Path,
) -> None:
    """Compare DDP, its fp16 and PowerSGD hooks, fp16_allreduce, dgc and localsgd on a slow link.

    The two hosts are network namespaces. New results replace those in OUT. Takes about half an hour on two idle cores.
    Needs root, Debian's iproute2 and, for the task, Debian's dataset-fashion-mnist.

    --only islands trains on two hosts with two workers each, and --only islands_times times the steps on an idle
    machine. Both append to a file and resume from it.
    """
    out = out or (OUT / "quick" if quick else OUT)
    if asked := [name for name in only if name in ISLANDS]:
        study_islands([] if only_report else asked, ways, runs, minutes, out)
        only = [name for name in only if name not in ISLANDS]
        if not only:
            return
    out.mkdir(parents=True, exist_ok=True)
    file = out / "slow_network.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for name in [] if only_report else only:
        try:
            plan = (QUICK if quick else FULL)[name]
            others = []
            if name == "steps":
                plan = replace(plan, blocks={model: n for model, n in plan.blocks.items() if model in models})
                others = [row for row in results.get(name, []) if row["model"] not in models]
            results |= measured(name, plan, results.get("notes", {}), out)
            results[name] += others
        except (CannotRunError, LabError) as error:
            raise click.ClickException(str(error)) from None
        file.write_text(_compact(results))
    show(results, out)


def study_islands(asked: list[str], ways: list[str], runs: Path, minutes: float, out: Path) -> None:
    for name in asked:
        try:
            command.measure(replace(command.PLAN, ways=ways), runs, minutes, times=name == "islands_times")
        except (CannotRunError, LabError) as error:
            raise click.ClickException(str(error)) from None
    islands.show(command.PLAN, runs, out)


def measured(name: str, plan: Any, notes: dict[str, Any], out: Path) -> dict[str, Any]:
    before = machine.load()
    workers = 2 if name == "hierarchy" else 1
    rows = []
    for number, part in enumerate(split(plan)):
        rows += study.run(MODULES[name], asdict(part), workers=workers, results=out / f"{name}.{number}.jsonl")
    about = {
        "plan": asdict(plan),
        "load_before": before,
        "load_after": machine.load(),
        "commit": machine.commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return {name: rows, "notes": notes | {name: about, "machine": machine.machine(), "malloc": study.MALLOC}}


def split(plan: Any) -> list[Any]:
    """Few methods per set of processes, because DDP and its hooks do not free their memory."""
    if not isinstance(plan, steps.Plan) or not plan.methods:
        return [plan]
    together = [plan.methods[i : i + TOGETHER] for i in range(0, len(plan.methods), TOGETHER)]
    return [
        replace(plan, blocks={model: 1}, first=block, methods=methods)
        for model, blocks in plan.blocks.items()
        for block in range(blocks)
        for methods in (together if block % 2 == 0 else reversed(together))
    ]


def _compact(results: dict[str, Any]) -> str:
    """JSON with one line per row."""
    parts = []
    for name, value in results.items():
        if isinstance(value, list):
            text = "[\n" + ",\n".join(json.dumps(row) for row in value) + "\n]"
        else:
            text = json.dumps(value, indent=1)
        parts.append(f"{json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def show(results: dict[str, Any], out: Path) -> None:
    console = Console()
    console = Console(width=max(console.width, 150))  # even if the output is a file
    tables = {}
    for title, lines in report.tables(results):
        head, *rest = lines
        table = Table(title=title, title_justify="left")
        for i, column in enumerate(head):
            table.add_column(column, justify="left" if i == 0 else "right")
        for line in rest:
            table.add_row(*line)
        console.print(table)
        tables[title] = report.as_markdown(iter([head, *rest]))
    pages.publish("slow_network", tables, out)
    try:
        report.plots(out, results)
    except ImportError:
        console.print("no plots, because matplotlib is not installed: pip install matplotlib")
    console.print(f"results are in {out}", highlight=False)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.slow_network")
