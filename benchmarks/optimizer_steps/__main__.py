"""python -m benchmarks.optimizer_steps: measure all of optimizers.py and print it as tables in Markdown."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from benchmarks.__main__ import OUT
from benchmarks.optimizers import GOALS, MALLOCS, MODELS, PEERS

MALLOC_WORDS = {"": "default", "_arena": "arena"}
BEGIN, END = "<!-- the tables -->", "<!-- end of the tables -->"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--out", type=click.Path(path_type=Path), default=OUT, help="The folder of the JSON.", show_default=True)
@click.option("--measured", is_flag=True, help="Measure nothing: the tables of what is in the folder.")
@click.option("--into", type=click.Path(exists=True, path_type=Path), help="A page whose tables are to be replaced.")
def main(out: Path, measured: bool, into: Path | None) -> None:
    """Measure the optimizers, some 10 minutes on an idle machine, and print tables in Markdown."""
    if not measured:
        subprocess.run([sys.executable, "-m", "benchmarks", "optimizers", "--out", str(out)], check=True, stdout=2)
    tables = "\n".join(text(out))
    click.echo(tables)
    if into:
        page = into.read_text()
        into.write_text(page[: page.index(BEGIN) + len(BEGIN)] + f"\n{tables}\n" + page[page.index(END) :])


def text(out: Path) -> Iterator[str]:
    yield from _machine(out)
    yield from _heading("optimizer", "model", "threads", "malloc", "compiled", "stock")
    for optimizer, model, threads, malloc in (
        (o, m, t, a) for o in ("lamb", "lars") for m in MODELS for t in (1, 2) for a in MALLOCS
    ):
        both = [_cell(out, f"{optimizer}_{model}_{kernels}_{threads}{malloc}") for kernels in ("compiled", "stock")]
        yield _row(optimizer.upper(), MODELS[model], str(threads), MALLOC_WORDS[malloc], *both)
    for optimizer in ("lamb", "lars"):
        goals = [f"{GOALS[optimizer, kernels]:g}" for kernels in ("compiled", "stock")]
        yield _row(f"goal of {optimizer.upper()}", "", "", "", *(f"≤ {goal}" for goal in goals))
    yield ""
    yield from _heading("optimizer", "model", "malloc", *(f"ours / {word}" for word in PEERS.values()))
    for optimizer, model, malloc in ((o, m, a) for o in ("lamb", "lars") for m in MODELS for a in MALLOCS):
        cells = [_cell(out, f"{optimizer}_{model}_{peer}{malloc}") for peer in PEERS]
        yield _row(optimizer.upper(), MODELS[model], MALLOC_WORDS[malloc], *cells)
    yield ""
    yield from _heading("torch's fused AdamW", *(f"threads: {threads}" for threads in (1, 2)))
    for model in MODELS:
        yield _row(MODELS[model], *(_cell(out, f"adamw_{model}_{threads}") for threads in (1, 2)))


def _machine(out: Path) -> Iterator[str]:
    found = [x for x in (_read(path) for path in sorted(out.glob("optimizers.*.json"))) if x["ratio"] is not None]
    if not found:
        raise click.ClickException(f"nothing was measured in {out}")
    m = found[0]["machine"]
    dates = sorted(x["date"] for x in found)
    loads = sorted(x["load_before"][0] for x in found)
    yield (
        f"Machine: {m['cpu']} ({', '.join(m['instructions'])}), {m['usable_cores']} cores, {m['memory_gib']} GiB, "
        f"{m['system']}, Python {m['python']}, torch {m['torch']}. {dates[0]} to {dates[-1]}; load before a benchmark "
        f"{loads[0]} to {loads[-1]}. The environment's own: {m['environment'] or 'nothing'}."
    )
    yield ""


def _heading(*cells: str) -> Iterator[str]:
    yield _row(*cells)
    yield _row(*("---" for _ in cells))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(out: Path, name: str) -> str:
    path = out / f"optimizers.{name}.json"
    if not path.exists():
        return "not measured"
    found = _read(path)
    if found["ratio"] is None:
        return found["verdict"]
    digits = 3 if found["ratio"] < 1 else 2
    low, high = (f"{found['statistics'][key]:.{digits}f}" for key in ("low", "high"))
    return f"{found['ratio']:.{digits}f} ({low}-{high}) {found['verdict'].replace('reported', '')}".strip()


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.optimizer_steps")
