"""What was considered, predicted and measured, and why the winner won: for a person to read, and to repeat."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fleetx.base.sizes import format_bytes
from fleetx.planner.model_profile import Work
from fleetx.planner.search import Considered, Search
from fleetx.strategy.cost_model import Cluster

log = logging.getLogger(__name__)
MARK = "# chosen by fleetx: strategy.auto"
SHOWN = 12
WIDTH = 150


def table(plans: Sequence[Considered], *, shown: int = SHOWN) -> str:
    out = Table(
        "plan", "feed", "predicted, s", "measured, s", "predicted peak", "measured peak", "why not",
        box=SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    for one in plans[:shown]:
        trial = one.trial if one.trial is not None and not one.trial.error else None
        cells = [
            one.candidate.title, str(one.candidate.feed), f"{'' if one.exact else '~'}{one.account.seconds:.3g}",
            f"{trial.seconds:.3g}" if trial else "", format_bytes(one.account.peak),
            format_bytes(trial.peak) if trial and trial.peak else "", one.why or "chosen",
        ]  # fmt: skip
        out.add_row(*map(Text, cells))  # as they are: an error may have brackets in it
    text = io.StringIO()
    Console(file=text, width=WIDTH, force_terminal=False, no_color=True).print(out)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    more = [f"... and {len(plans) - shown} more"] if len(plans) > shown else []
    return "\n".join([*lines, *more])


def where(cluster: Cluster, work: Work) -> str:
    """What the predictions stand on."""
    hosts = f"{cluster.hosts} hosts of {cluster.inside}" if cluster.hosts > 1 else "one host"
    link = f"all-reduce {cluster.flat.speed / 1e6:,.0f} MB/s after {1e3 * cluster.flat.latency:.2f} ms; "
    n, way = work.samples, work.plain
    return (
        f"{cluster.ranks} rank{'s' if cluster.ranks > 1 else ''} on {hosts}, {cluster.device}, "
        f"{format_bytes(cluster.memory)} each; "
        f"{link if cluster.ranks > 1 else ''}{n} samples take {way.forward.at(n):.3g} s forward and "
        f"{way.backward.at(n):.3g} s backward, an update {work.update:.3g} s; "
        f"parameters {format_bytes(work.parameters)}"
    )


def account_line(best: Considered) -> str:
    a = best.account
    spent = {"forward and backward": a.compute, "recomputation": a.again, "waiting for stages": a.waiting,
             "network not hidden": a.network, "update": a.update, "strategies": a.beside}  # fmt: skip
    return "predicted: " + ", ".join(f"{name} {s:.3g} s" for name, s in spent.items() if s >= 0.001 * a.seconds)


def full(search: Search, best: Considered, took: float) -> str:
    tried = sum(one.trial is not None for one in search.plans)
    return "\n".join(
        [
            f"auto: {best.candidate.title}",
            f"batch: {best.candidate.equation}",
            account_line(best),
            f"measured here: {where(search.cluster, search.work)}",
            f"{search.considered} plans predicted, {tried} tried, in {took:.0f} s",
            table(search.plans),
        ]
    )


_written: set[Path] = set()  # by this process: another model has another strategy


def write(declared: dict[str, Any], equation: str, folder: Path) -> str:
    """The strategy of the winner; where it was written. A file that somebody else wrote is left as it is."""
    try:
        return str(_write(declared, equation, folder))
    except OSError as error:
        log.warning("the chosen strategy could not be written: %s", error)
        return ""


def _write(declared: dict[str, Any], equation: str, folder: Path) -> Path:
    path = folder / "strategy.yaml"
    number = 0
    while path in _written or (path.exists() and not _ours(path)):
        number += 1
        path = folder / f"strategy.auto{number if number > 1 else ''}.yaml"
    text = f"{MARK}\n# {equation}\n" + yaml.safe_dump(declared, sort_keys=False)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    _written.add(path)
    return path


def _ours(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().startswith(MARK)
