"""A record, read back. No torch here."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetx.errors import UsageError
from fleetx.record.schema import SCHEMA

Line = dict[str, Any]


@dataclass
class Record:
    """The lines of a run, by kind and in their order."""

    folder: Path
    starts: list[Line] = field(default_factory=list)
    plans: dict[int, Line] = field(default_factory=dict)  # by the number of the model
    rounds: list[Line] = field(default_factory=list)  # of rank 0; what a resumed run repeated counts once
    ranks: dict[int, list[Line]] = field(default_factory=lambda: defaultdict(list))  # what each rank has used
    events: list[Line] = field(default_factory=list)
    values: list[Line] = field(default_factory=list)
    traces: list[Line] = field(default_factory=list)
    unreadable: int = 0  # lines that were cut off

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def size(self) -> int:
        return int(self.starts[-1]["ranks"])


def read(folder: str | Path) -> Record:
    """Raises UsageError if there is no record, or one of a later version."""
    folder = Path(folder)
    path = folder / "rank0.jsonl"
    if not path.is_file():
        raise UsageError(f"{folder} has no rank0.jsonl: call fleet.record({str(folder)!r}) in the script")
    found = Record(folder)
    for line in _lines(path, found):
        _add(found, line)
    if not found.starts:
        raise UsageError(f"{path} has no complete line yet: wait until the run has begun")
    return found


def _lines(path: Path, found: Record) -> Iterator[Line]:
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                found.unreadable += 1
                continue
            if isinstance(line, dict) and "kind" in line:
                yield line


def _add(found: Record, line: Line) -> None:
    kind = line["kind"]
    if kind == "start":
        if line["schema"] > SCHEMA:
            raise UsageError(f"{found.folder} was recorded by a newer fleetx (schema {line['schema']}): update fleetx")
        found.starts.append(line)
    elif kind == "plan" and line["rank"] == 0:
        found.plans[line["model"]] = line
    elif kind == "round" and line["rank"] == 0:
        _drop_repeated(found.rounds, line)
        found.rounds.append(line)
    elif kind == "rank":
        found.ranks[line["rank"]].append(line)
    elif kind in ("event", "value", "trace"):
        getattr(found, f"{kind}s").append(line)


def _drop_repeated(rounds: list[Line], line: Line) -> None:
    """A run that went back to a checkpoint does some rounds again: the later ones count."""
    if any(r["round"] >= line["round"] and r["model"] == line["model"] for r in rounds[-2:]):
        rounds[:] = [r for r in rounds if r["model"] != line["model"] or r["round"] < line["round"]]
