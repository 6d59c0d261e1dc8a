"""Reads a record back. No torch here."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetx.base.suggest import did_you_mean
from fleetx.errors import UsageError
from fleetx.record.schema import INSIDE, KEYS, SCHEMA

RecordLine = dict[str, Any]


@dataclass
class Record:
    """The lines of a run, by kind and in their order."""

    folder: Path
    starts: list[RecordLine] = field(default_factory=list)
    plans: dict[int, RecordLine] = field(default_factory=dict)  # by the number of the model
    rounds: list[RecordLine] = field(default_factory=list)  # of rank 0; rounds that a resumed run repeated count once
    ranks: dict[int, list[RecordLine]] = field(default_factory=lambda: defaultdict(list))  # what each rank has used
    events: list[RecordLine] = field(default_factory=list)
    values: list[RecordLine] = field(default_factory=list)
    traces: list[RecordLine] = field(default_factory=list)
    unreadable: int = 0  # lines that were cut off, or are not fleetx's
    last: float = 0.0  # when the last line was written

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def size(self) -> int:
        return int(self.starts[-1]["ranks"])


class NotBegunError(UsageError):
    """There is no record yet, but there may be one later."""


def read(folder: str | Path) -> Record:
    """Raises UsageError if there is no record, or one of a later version."""
    folder = Path(folder)
    path = folder / "rank0.jsonl"
    if not path.is_file():
        raise _missing(folder)
    found = Record(folder)
    for line in _lines(path, found):
        _add(found, line)
    if not found.starts:
        if found.unreadable:
            raise UsageError(f"{path} is not a record of fleetx: none of its lines says how a run began")
        raise NotBegunError(f"{path} has no complete line yet: wait until the run has begun")
    return found


def _missing(folder: Path) -> UsageError:
    """The error for a missing record, which says what is there instead."""
    if folder.is_file():
        run = f": {folder.parent}" if (folder.parent / "rank0.jsonl").is_file() else ""
        return UsageError(f"{folder} is a file: give the folder of a run{run}")
    if runs := _runs_in(folder):
        return UsageError(f"{folder} is not a run, but has some in it: give one or more of {', '.join(runs)}")
    known = {Path(run).name: run for run in _runs_in(folder.parent)} if not folder.exists() else {}
    near = did_you_mean(folder.name, known, quote=False)
    lacks = "has no rank0.jsonl" if folder.exists() else "does not exist"
    hint = f"{near} Otherwise, " if near else ""
    return NotBegunError(f"{folder} {lacks}: {hint}call fleet.record({str(folder)!r}) in the script")


def _runs_in(folder: Path) -> list[str]:
    try:
        return sorted(str(path.parent) for path in folder.glob("*/rank0.jsonl"))
    except OSError:
        return []


def _lines(path: Path, found: Record) -> Iterator[RecordLine]:
    with open(path, encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                found.unreadable += text.endswith("\n")  # else it is being written
                continue
            if not isinstance(line, dict) or not isinstance(kind := line.get("kind"), str):
                found.unreadable += 1
                continue
            newer = line.get("schema") if kind == "start" else None
            if isinstance(newer, int) and newer > SCHEMA:
                raise UsageError(f"{found.folder} was recorded by a newer fleetx (schema {newer}): upgrade fleetx")
            if kind in KEYS and not _complete(line, KEYS[kind]):
                found.unreadable += 1
                continue
            yield line


def _complete(line: RecordLine, keys: dict[str, Any]) -> bool:
    if not all(isinstance(line.get(key), of) for key, of in keys.items()):
        return False
    needed = ((line[key], names) for key, names in INSIDE.items() if key in keys)
    return all(isinstance(numbers.get(name), int | float) for numbers, names in needed for name in names)


def _add(found: Record, line: RecordLine) -> None:
    kind = line["kind"]
    if kind in KEYS:
        found.last = max(found.last, line["t"])
    if kind == "start":
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


def _drop_repeated(rounds: list[RecordLine], line: RecordLine) -> None:
    """A run that went back to a checkpoint repeats some rounds: the later ones count."""
    if any(r["round"] >= line["round"] and r["model"] == line["model"] for r in rounds[-2:]):
        rounds[:] = [r for r in rounds if r["model"] != line["model"] or r["round"] < line["round"]]
