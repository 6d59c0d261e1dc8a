"""`fleet.progress`: the progress of a loop, on the terminal of rank 0."""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from fleetx.comm.session import Session

_REFRESH = 0.5  # seconds between redraws: each takes a millisecond


def shown(loader: Iterable[Any], total: int | None, every: float, session: Session) -> Iterator[Any]:
    if session.here().rank:
        yield from loader
        return
    if total is None:
        total = operator.length_hint(loader) or None
    console = Console(stderr=True)
    pace = _Speed(session, total)
    if console.is_terminal:
        with Live(_table(pace.facts()), console=console, auto_refresh=False, transient=False) as live:
            yield from _counted(loader, pace, _REFRESH, lambda: live.update(_table(pace.facts()), refresh=True))
    else:
        yield from _counted(loader, pace, every, lambda: print(_line(pace.facts()), file=sys.stderr, flush=True))


def _counted(loader: Iterable[Any], pace: _Speed, every: float, show: Any) -> Iterator[Any]:
    due, said = time.monotonic() + every, -1
    try:
        for batch in loader:
            yield batch
            pace.done += 1
            if time.monotonic() >= due:
                show()
                due, said = time.monotonic() + every, pace.done
    finally:
        if said != pace.done:
            show()


class _Speed:
    """Batches that are done, and how fast."""

    def __init__(self, session: Session, total: int | None):
        self._session, self._total, self._begun = session, total, time.monotonic()
        self._before = self._samples()
        self.done = 0

    def _samples(self) -> tuple[float, int]:
        recorder = self._session.recorder
        return time.monotonic(), recorder.samples if recorder is not None else 0

    def facts(self) -> dict[str, Any]:
        """What is known, as text to print; only `share` is a number."""
        seconds = time.monotonic() - self._begun
        found: dict[str, Any] = {"batches": f"{self.done}" if self._total is None else f"{self.done} of {self._total}"}
        if self._total:
            found["share"] = min(self.done / self._total, 1.0)
        recorder = self._session.recorder
        latest = recorder.latest if recorder is not None else {}
        if "round" in latest:
            found["update"] = f"{latest['round']}"
        if "loss" in latest:
            found["loss"] = f"{latest['loss']:.4g}"
        if "rate" in latest:
            found["learning rate"] = f"{latest['rate']:.3g}"
        (then, before), (now, samples) = self._before, self._samples()
        if samples > before and now > then:
            replicas = max((size for _, size in self._session.shares()), default=1)
            speed = replicas * (samples - before) / (now - then)
            found["samples/s"] = f"{speed:,.0f}" if speed >= 1000 else f"{speed:.4g}"
        found["time"] = _clock(seconds)
        if self._total and self.done:
            found["left"] = _clock(seconds * (self._total - self.done) / self.done)
        return found


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _table(facts: dict[str, Any]) -> Table:
    cells = {name: value for name, value in facts.items() if name != "share"}
    table = Table(*cells, box=None, pad_edge=False, header_style="bold")
    table.add_row(*cells.values())
    if "share" not in facts:
        return table
    both = Table.grid()
    both.add_row(ProgressBar(total=1.0, completed=facts["share"], width=60))
    both.add_row(table)
    return both


def _line(facts: dict[str, Any]) -> str:
    return "fleetx: " + ", ".join(f"{name} {value}" for name, value in facts.items() if name != "share")
