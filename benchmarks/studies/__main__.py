"""python -m benchmarks.studies: the tables of docs/results from the committed results of the studies."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

import click

from benchmarks.__main__ import OUT
from benchmarks.frame.pages import RESULTS

# What each study is run with, as its page says.
RUNS: dict[str, list[list[str]]] = {
    "recompute": [
        ["--only", "trade"],
        ["--only", "compiled"],
        ["--only", "batches", "--models", "bert_large"],
        ["--only", "batches", "--models", "resnet,bert", "--memory", "3GiB"],
    ],
    "slow_network": [[]],
    "auto": [[]],
    "large_batch": [[]],
}
JEMALLOC = {"LD_PRELOAD": "libjemalloc.so.2", "MALLOC_CONF": "dirty_decay_ms:-1,muzzy_decay_ms:-1"}


class StudyError(Exception):
    """The page of a study stays as it is; the message says why."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--run", "anew", is_flag=True, help="Run the studies first: some hours, and root for the links.")
def main(anew: bool) -> None:
    """Write the tables of the studies into docs/results, from the results there."""
    failed = False
    for study in RUNS:
        try:
            if anew:
                run(study)
            start(study, ["--report", "--out", str(RESULTS)])
        except StudyError as reason:
            failed = True
            print(f"{study}.md stays as it is: {reason}", file=sys.stderr)
    sys.exit(failed)


def run(study: str) -> None:
    """Only results that are complete come to docs/results; large_batch keeps its runs there by itself."""
    for words in RUNS[study]:
        start(study, words, environment(study))
    if study != "large_batch":
        shutil.copy(OUT / study / f"{study}.json", RESULTS)


def environment(study: str) -> dict[str, str]:
    if study != "recompute":
        return {}
    try:
        ctypes.CDLL(JEMALLOC["LD_PRELOAD"])  # the loader only warns of a library that it cannot preload
    except OSError:
        raise StudyError("it is measured with jemalloc, which is not installed (Debian's libjemalloc2)") from None
    return JEMALLOC


def start(study: str, words: Sequence[str], variables: dict[str, str] | None = None) -> None:
    """In a process of its own, because an allocator is chosen when a process begins."""
    command = [sys.executable, "-m", f"benchmarks.{study}", *words]
    code = subprocess.run(command, env=os.environ | (variables or {})).returncode
    if code:
        raise StudyError(f"`python -m benchmarks.{' '.join([study, *words])}` ended with {code}")


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.studies")
