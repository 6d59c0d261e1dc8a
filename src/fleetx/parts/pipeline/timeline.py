"""A schedule as lines of text: what each rank does when, if a backward takes as long as two forwards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_LONG = {"F": 1, "B": 2, "I": 1, "W": 1}
_MOST = 36  # moments that fit on a line


def draw(schedule: Any, ranks: int) -> Iterator[str]:
    """`F0`: the forward of micro-batch 0, `B0`: its backward; I and W: with respect to inputs and to weights."""
    name, number = type(schedule).__name__.removeprefix("Schedule"), schedule._n_microbatches
    if name in ("1F1B", "GPipe"):  # torch's own list for 1F1B counts the forwards of the last stage from 1
        order = {rank: _single(name, rank, ranks, number) for rank in range(ranks)}
    else:
        order = {rank: [*_flat(schedule.pipeline_order[rank])] for rank in range(ranks)}
    rows, end = _placed(order, schedule._num_stages)
    yield f"{name}, {number} micro-batches, where a backward takes as long as two forwards:"
    width = max((len(text) for row in rows.values() for _, _, text in row), default=2) + 1
    for rank, row in rows.items():
        cells = [" ." for _ in range(end)]
        for begin, long, text in row:
            cells[begin] = text
            for more in range(begin + 1, begin + long):
                cells[more] = " -"
        shown = "".join(cell.ljust(width) for cell in cells[:_MOST])
        yield f"  rank {rank} |{shown}{'...' if end > _MOST else '|'}"
    busy = sum(long for row in rows.values() for _, long, _ in row)
    yield f"  busy {busy / (end * ranks):.0%} of the time"


def _single(name: str, rank: int, ranks: int, number: int) -> list[tuple[str, int, int]]:
    """One stage on each rank: all forwards first, or as few as keep the next stages busy."""
    ahead = number if name == "GPipe" else min(number, ranks - rank)
    forwards = [("F", rank, i) for i in range(number)]
    backwards = [("B", rank, i) for i in range(number)]
    mixed = [x for pair in zip(backwards, forwards[ahead:], strict=False) for x in pair]
    return forwards[:ahead] + mixed + backwards[number - ahead :]


def _flat(actions: Any) -> Iterator[tuple[str, int, int]]:
    for action in actions:
        if action is None:
            continue
        for one in getattr(action, "sub_actions", None) or (action,):
            kind = one.computation_type.value
            if kind in _LONG:
                yield kind, one.stage_index, one.microbatch_index


def _placed(order: dict[int, list[tuple[str, int, int]]], stages: int) -> tuple[dict[int, list[Any]], int]:
    """Each action as early as its rank and what it waits for allow."""
    done: dict[tuple[str, int, int], int] = {}
    rows: dict[int, list[Any]] = {rank: [] for rank in order}
    free = dict.fromkeys(order, 0)
    at = dict.fromkeys(order, 0)
    moved = True
    several = len({s for actions in order.values() for _, s, _ in actions}) > len(order)
    while moved:
        moved = False
        for rank, actions in order.items():
            while at[rank] < len(actions):
                kind, stage, micro = actions[at[rank]]
                needs = _needs(kind, stage, micro, stages, done)
                if needs is None:
                    break
                begin = max(free[rank], needs)
                free[rank] = begin + _LONG[kind]
                done[kind, stage, micro] = free[rank]
                text = f"{kind}{micro}" + (f"/{stage}" if several else "")
                rows[rank].append((begin, _LONG[kind], text))
                at[rank] += 1
                moved = True
    return rows, max(free.values())


def _needs(kind: str, stage: int, micro: int, stages: int, done: dict[Any, int]) -> int | None:
    """When it can begin; None: what it waits for is not done yet."""

    def end(*kinds: str, of: int) -> int | None:
        return next((done[k, of, micro] for k in kinds if (k, of, micro) in done), None)

    if kind == "F":
        return 0 if stage == 0 else end("F", of=stage - 1)
    if kind == "W":
        return end("I", of=stage)
    own = end("F", of=stage)
    later = own if stage == stages - 1 else end("B", "I", of=stage + 1)
    return None if own is None or later is None else max(own, later)
