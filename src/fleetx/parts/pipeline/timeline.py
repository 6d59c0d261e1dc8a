"""Draws a schedule as text: what each rank does when, if a backward takes as long as two forwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fleetx.base import seams

Action = tuple[str, int, int]  # kind, stage, micro-batch
_DURATION = {"F": 1, "B": 2, "I": 1, "W": 1}
_WIDTH = 36  # time units per line


def draw(schedule: Any, ranks: int) -> Iterator[str]:
    """`F0`: forward of micro-batch 0, `B0`: its backward; I and W: backward for inputs and for weights only."""
    name, number = _named(schedule)
    order = {rank: order_of(schedule, rank, ranks) for rank in range(ranks)}
    rows, end = _timed(order, seams.num_stages(schedule))
    yield f"{name}, {number} micro-batches, if a backward takes as long as two forwards:"
    width = max((len(text) for row in rows.values() for _, _, text in row), default=2) + 1
    for rank, row in rows.items():
        cells = [" ." for _ in range(end)]
        for begin, duration, text in row:
            cells[begin : begin + duration] = [text, *[" -"] * (duration - 1)]
        shown = "".join(cell.ljust(width) for cell in cells[:_WIDTH])
        yield f"  rank {rank} |{shown}{'...' if end > _WIDTH else '|'}"
    busy = sum(duration for row in rows.values() for _, duration, _ in row)
    yield f"  busy {busy / (end * ranks):.0%} of the time"


def order_of(schedule: Any, rank: int, ranks: int) -> list[Action]:
    """The actions of a rank, in order."""
    name, number = _named(schedule)
    if name in ("1F1B", "GPipe"):  # torch's own list for 1F1B counts the forwards of the last stage from 1
        return _single(name, rank, ranks, number)
    return [*_flat(schedule.pipeline_order[rank])]


def _named(schedule: Any) -> tuple[str, int]:
    """The name of the schedule, and the number of micro-batches."""
    return type(schedule).__name__.removeprefix("Schedule"), seams.n_microbatches(schedule)


def _single(name: str, rank: int, ranks: int, number: int) -> list[Action]:
    """One stage per rank: all forwards first, or only as many as keep the next stages busy."""
    ahead = number if name == "GPipe" else min(number, ranks - rank)
    forwards = [("F", rank, i) for i in range(number)]
    backwards = [("B", rank, i) for i in range(number)]
    mixed = [x for pair in zip(backwards, forwards[ahead:], strict=False) for x in pair]
    return forwards[:ahead] + mixed + backwards[number - ahead :]


def _flat(actions: Any) -> Iterator[Action]:
    for action in actions:
        if action is None:
            continue
        for one in getattr(action, "sub_actions", None) or (action,):
            kind = one.computation_type.value
            if kind in _DURATION:
                yield kind, one.stage_index, one.microbatch_index


def _timed(order: dict[int, list[Action]], stages: int) -> tuple[dict[int, list[tuple[int, int, str]]], int]:
    """Start each action as early as its rank and its dependencies allow. Returns the rows and the end."""
    done: dict[Action, int] = {}
    rows: dict[int, list[tuple[int, int, str]]] = {rank: [] for rank in order}
    free = dict.fromkeys(order, 0)
    several = len({s for actions in order.values() for _, s, _ in actions}) > len(order)
    progress = True
    while progress:
        progress = False
        for rank, actions in order.items():
            for kind, stage, micro_batch in actions[len(rows[rank]) :]:
                ready = _ready(kind, stage, micro_batch, stages, done)
                if ready is None:
                    break
                begin = max(free[rank], ready)
                free[rank] = done[kind, stage, micro_batch] = begin + _DURATION[kind]
                text = f"{kind}{micro_batch}" + (f"/{stage}" if several else "")
                rows[rank].append((begin, _DURATION[kind], text))
                progress = True
    return rows, max(free.values())


def _ready(kind: str, stage: int, micro_batch: int, stages: int, done: dict[Action, int]) -> int | None:
    """When an action can start. None if a dependency is not done yet."""

    def end(*kinds: str, of: int) -> int | None:
        return next((done[k, of, micro_batch] for k in kinds if (k, of, micro_batch) in done), None)

    if kind == "F":
        return 0 if stage == 0 else end("F", of=stage - 1)
    if kind == "W":
        return end("I", of=stage)
    own = end("F", of=stage)
    later = own if stage == stages - 1 else end("B", "I", of=stage + 1)
    return None if own is None or later is None else max(own, later)
