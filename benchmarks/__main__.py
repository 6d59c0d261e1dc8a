"""python -m benchmarks [NAME]...: measure, print a table, write JSON; --write: and the tables of docs/results."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

from benchmarks.frame import machine, pages, table
from benchmarks.frame.declare import Benchmark, UnknownBenchmarkError, chosen, every
from benchmarks.frame.result import Result, divided, measured
from benchmarks.frame.verdict import ENOUGH, Verdict

OUT = Path(__file__).parent / "out"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--list", "only_list", is_flag=True, help="Show the benchmarks and run none.")
@click.option("--rounds", type=click.IntRange(min=1), help="Pairs of samples; each benchmark has its own default.")
@click.option("--quick", is_flag=True, help=f"{ENOUGH} rounds: to see that everything runs.")
@click.option("--strict", is_flag=True, help="Exit with 1 unless every goal is met.")
@click.option("--out", type=click.Path(path_type=Path), default=OUT, help="The folder for the JSON.", show_default=True)
@click.option("--write", is_flag=True, help="Put the tables into docs/results.")
@click.option("--partial", is_flag=True, help="With --write: also pages of which only a part has been run.")
@click.option("--measured", "only_write", is_flag=True, help="With --write: run nothing, take what --out has.")
def main(
    names: tuple[str, ...], only_list: bool, rounds: int | None, quick: bool, strict: bool, out: Path,
    write: bool, only_write: bool, partial: bool,
) -> None:  # fmt: skip
    """Measure ratios side by side: fleetx against what one would use without it.

    NAME is a file (overhead) or one benchmark in it (overhead.plain); without any, all are run.
    """
    if rounds and quick:
        raise click.UsageError("--quick is a number of rounds already: leave out one of the two")
    if ((only_write or partial) and not write) or (quick and write):
        raise click.UsageError("--measured and --partial are about --write, and --quick measures too little for it")
    try:
        known = every()
        benchmarks = chosen(names, known)
    except UnknownBenchmarkError as error:
        raise click.UsageError(str(error)) from None
    console = Console()
    if only_list:
        console.print(table.listing(benchmarks))
        return
    results = [] if only_write else run(benchmarks, console, rounds=ENOUGH if quick else rounds, out=out)
    if write:
        for page in dict.fromkeys(filter(None, map(pages.page_of, benchmarks))):
            try:
                path = pages.write(page, pages.shown_on(page, known.values()), out=out, partial=partial)
                console.print(f"wrote {path}", highlight=False)
            except pages.CannotWriteError as reason:
                console.print(str(reason), highlight=False)
    sys.exit(exit_code([r.verdict for r in results], strict=strict))


def run(benchmarks: list[Benchmark], console: Console, *, rounds: int | None, out: Path) -> list[Result]:
    console.print(f"load {machine.load()[0]:.2f} on {machine.machine()['usable_cores']} cores", highlight=False)
    results = []
    for b in benchmarks:
        # No spinner: it would take time from those who are measured.
        n = divided(rounds or b.rounds, starts=b.starts)
        console.print(f"{b.name}: {b.meaning} ({sum(n)} rounds in {len(n)} starts)", highlight=False)
        results.append(measured(b, rounds=rounds, out=out))
        console.print(table.line(results[-1]), markup=False, highlight=False)
    console.print(table.results(results))
    for r in results:
        if r.verdict is Verdict.FAILED:
            console.print(f"{r.benchmark.name} {r.reason}", markup=False, highlight=False)
    console.print(f"load {machine.load()[0]:.2f}; samples in {out}", highlight=False)
    return results


def exit_code(verdicts: list[Verdict], *, strict: bool) -> int:
    """A goal that is missed is a finding, not a failure, unless `strict`; a benchmark that breaks always is one."""
    fine = {Verdict.MET, Verdict.REPORTED} if strict else set(Verdict) - {Verdict.FAILED}
    return int(not fine.issuperset(verdicts))


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
