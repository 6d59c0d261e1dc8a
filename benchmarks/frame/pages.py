"""The tables of docs/results, from the JSON of the benchmarks.

A file of benchmarks says which page shows them, `PAGE = "overhead.md"`; several files may share one. What lies between
two marks of that page is replaced by a line per benchmark, or by what `tables(out)` of the file yields.

The page of a study has text between its tables. Each stands below a mark of its own, `<!-- table: TITLE -->`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.frame.declare import Benchmark
from benchmarks.frame.verdict import shown

RESULTS = Path(__file__).parents[2] / "docs" / "results"
BEGIN, END = "<!-- the tables -->", "<!-- end of the tables -->"
Found = dict[str, Any]


class CannotWriteError(Exception):
    """A page stays as it is; the message says why."""


def shown_on(page: str, known: Iterable[Benchmark]) -> list[Benchmark]:
    return [b for b in known if page_of(b) == page]


def page_of(benchmark: Benchmark) -> str:
    return getattr(sys.modules[benchmark.function.__module__], "PAGE", "")


def write(page: str, benchmarks: Sequence[Benchmark], *, out: Path, partial: bool = False) -> Path:
    """Replace the tables of a page, if everything that it shows has been run; it names what a machine cannot run.

    partial: also if something has not been run, which the page then names.
    """
    missing = [b.name for b in benchmarks if _read(out, b.name).get("verdict", "failed") == "failed"]
    tables = getattr(sys.modules[benchmarks[0].function.__module__], "tables", None)
    if missing and (not partial or tables or len(missing) == len(benchmarks)):
        raise CannotWriteError(f"{page} stays as it is: {out} has no results of {', '.join(missing)}")
    benchmarks = [b for b in benchmarks if b.name not in missing]
    lines = list(tables(out) if tables else _lines(benchmarks, out))
    if missing:
        lines += ["", f"Not measured in this run: {', '.join(f'`{name}`' for name in missing)}."]
    path = RESULTS / page
    old = path.read_text()
    if BEGIN not in old or END not in old:
        raise CannotWriteError(f"{page} stays as it is: it has no lines {BEGIN} and {END}")
    found = [_read(out, b.name) for b in benchmarks]
    new = "\n".join([measured_on(found), "", *lines])
    path.write_text(old[: old.index(BEGIN) + len(BEGIN)] + f"\n{new}\n" + old[old.index(END) :])
    return path


def publish(name: str, tables: Mapping[str, str], out: Path) -> Path:
    """Put the tables of a study into its page if `out` is docs/results, and into tables.md anywhere else."""
    page = out / f"{name}.md"
    if page.exists():
        page.write_text(filled(page.read_text(), tables))
    else:
        page = out / "tables.md"
        page.write_text("\n".join(f"## {title}\n\n{table}" for title, table in tables.items()))
    return page


def filled(page: str, tables: Mapping[str, str]) -> str:
    """The text of a study's page with the tables below its marks, found by title; it need not show all of them."""

    def table(mark: re.Match[str]) -> str:
        if mark[1] not in tables:
            raise CannotWriteError(f"the page shows the table {mark[1]!r}, which these results do not have")
        return f"<!-- table: {mark[1]} -->\n{tables[mark[1]].strip()}\n"

    return re.sub(r"<!-- table: (.+) -->\n(?:\|.*\n)*", table, page)


def measured_on(found: Sequence[Found]) -> str:
    """Machine, command, date, load."""
    m = found[0]["machine"]
    dates, loads = sorted(x["date"] for x in found), sorted(x["load_before"][0] for x in found)
    files = dict.fromkeys(x["name"].partition(".")[0] for x in found)
    variables = " ".join(f"`{k}={v}`" for k, v in m["environment"].items()) or "nothing set"
    return (
        f"Machine: {m['cpu']} ({', '.join(m['instructions'])}), {m['usable_cores']} cores, {m['memory_gib']} GiB, "
        f"{m['system']}, Python {m['python']}, torch {m['torch']}. {dates[0]} to {dates[-1]}, "
        f"commit {found[-1]['commit']}; load before a benchmark {loads[0]} to {loads[-1]}; environment: {variables}. "
        f'Command: `make bench ARGS="{" ".join(files)}"`.'
    )


def heading(*cells: str) -> list[str]:
    return [row(*cells), row(*("---" for _ in cells))]


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _lines(benchmarks: Sequence[Benchmark], out: Path) -> Iterator[str]:
    yield from heading("benchmark", "what is compared", "ours", "theirs", "ratio", "95 %", "goal", "verdict")
    for b in benchmarks:
        found = _read(out, b.name)
        figures = [""] * 4
        if found["ratio"] is not None:
            low, high = (f"{found['statistics'][key]:.3f}" for key in ("low", "high"))
            sides = [_median(found[side]["median"], found["unit"]) for side in ("ours", "theirs")]
            figures = [*sides, f"{found['ratio']:.3f}", f"{low} to {high}"]
        goal = "" if b.goal is None else f"at most {b.goal:g}"
        verdict = found["verdict"]
        if b.budget is not None:
            goal = f"at most {shown(b.budget)}"
        if found["unit"] == "s" and (b.budget is not None or verdict == "reported"):
            keys = ("least_difference", "difference", "most_difference")
            low, middle, high = (shown(found["statistics"][key]) for key in keys)
            verdict += f": {middle} ({low} to {high})"
        yield row(f"`{b.name}`", f"{b.meaning.rstrip('.')} ({b.ours} / {b.theirs})", *figures, goal, verdict)


def _median(value: float, unit: str) -> str:
    return f"{value * 1e3:,.1f} ms" if unit == "s" else f"{value:,.1f} {unit}"


def _read(out: Path, name: str) -> Found:
    path = out / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}
