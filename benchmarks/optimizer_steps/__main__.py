"""python -m benchmarks.optimizer_steps: run all of optimizers.py and print the results as Markdown tables."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from benchmarks.__main__ import OUT
from benchmarks.optimizers import GOALS, KERNELS, MALLOCS, MODELS, MUONS, PEERS

MALLOC_WORDS = {"": "default", "_arena": "arena"}
BEGIN, END = "<!-- the tables -->", "<!-- end of the tables -->"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--out", type=click.Path(path_type=Path), default=OUT, help="Folder of the JSON.", show_default=True)
@click.option("--measured", is_flag=True, help="Do not measure; print the results in the folder.")
@click.option("--into", type=click.Path(exists=True, path_type=Path), help="A Markdown page whose tables to replace.")
def main(out: Path, measured: bool, into: Path | None) -> None:
    """Measure the optimizers, about 10 minutes on an idle machine, and print the results as Markdown tables."""
    if not measured:
        subprocess.run([sys.executable, "-m", "benchmarks", "optimizers", "--out", str(out)], check=True, stdout=2)
    tables = "\n".join(text(out))
    click.echo(tables)
    if into:
        page = into.read_text()
        into.write_text(page[: page.index(BEGIN) + len(BEGIN)] + f"\n{tables}\n" + page[page.index(END) :])


def text(out: Path) -> Iterator[str]:
    yield from _machine(out)
    yield from _heading("optimizer", "model", "threads", "malloc", *KERNELS)
    for optimizer, model, threads, malloc in (
        (o, m, t, a) for o in ("lamb", "lars") for m in MODELS for t in (1, 2) for a in MALLOCS
    ):
        cells = [_cell(out, f"{optimizer}_{model}_{kernels}_{threads}{malloc}") for kernels in KERNELS]
        yield _row(optimizer.upper(), MODELS[model], str(threads), MALLOC_WORDS[malloc], *cells)
    for (optimizer, _), goal in GOALS.items():
        yield _row(f"goal for {optimizer.upper()}", "", "", "", f"≤ {goal:g}", "")
    yield ""
    yield from _heading("optimizer", "model", "malloc", *(f"ours / {word}" for word in PEERS.values()))
    for optimizer, model, malloc in ((o, m, a) for o in ("lamb", "lars") for m in MODELS for a in MALLOCS):
        cells = [_cell(out, f"{optimizer}_{model}_{peer}{malloc}") for peer in PEERS]
        yield _row(optimizer.upper(), MODELS[model], MALLOC_WORDS[malloc], *cells)
    yield ""
    yield from _heading("Muon on BERT-base, one thread", "units", "ours / torch, 1 rank", "ours / torch, 2 ranks")
    for optimizer, word in MUONS.items():
        yield _row(word, *(_cell(out, f"{optimizer}_bert_{what}") for what in ("stream", "torch_1", "torch_2")))
    yield ""
    yield from _heading("torch's fused AdamW", *(f"threads: {threads}" for threads in (1, 2)))
    for model in MODELS:
        yield _row(MODELS[model], *(_cell(out, f"adamw_{model}_{threads}") for threads in (1, 2)))


def _machine(out: Path) -> Iterator[str]:
    results = [x for x in (_read(path) for path in sorted(out.glob("optimizers.*.json"))) if x["ratio"] is not None]
    if not results:
        raise click.ClickException(f"{out} has no results")
    m = results[0]["machine"]
    dates = sorted(x["date"] for x in results)
    loads = sorted(x["load_before"][0] for x in results)
    yield (
        f"Machine: {m['cpu']} ({', '.join(m['instructions'])}), {m['usable_cores']} cores, {m['memory_gib']} GiB, "
        f"{m['system']}, Python {m['python']}, torch {m['torch']}. {dates[0]} to {dates[-1]}; load before a run "
        f"{loads[0]} to {loads[-1]}. Environment variables: {m['environment'] or 'none'}."
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
    result = _read(path)
    if result["ratio"] is None:
        return result["verdict"]
    digits = 3 if result["ratio"] < 1 else 2
    low, high = (f"{result['statistics'][key]:.{digits}f}" for key in ("low", "high"))
    return f"{result['ratio']:.{digits}f} ({low}-{high}) {result['verdict'].replace('reported', '')}".strip()


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.optimizer_steps")
