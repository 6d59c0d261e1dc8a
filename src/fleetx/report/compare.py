"""What several runs used, side by side: one plot with bars for each run, and one table with a column for each.

Plots label runs by letter, because there is no room for names on a phone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from html import escape

from fleetx.record.read import Record
from fleetx.record.schema import TIMES
from fleetx.report import facts, svg, usage
from fleetx.report.sections import MOST_RANKS, TIME, keys_of, straggling, table

_NONE = "-"
Bars = list[tuple[str, list[float]]]


def _compared(
    plot: str, label: str, records: Sequence[Record], bars: Bars, rows: Sequence[Sequence[str]],
    shown: Callable[[float], str], legend: Sequence[str] = (),
) -> str:  # fmt: skip
    named = svg.legend(legend) if legend else ""
    head = ["", *(f"{key}: {record.name}" for key, record in zip(keys_of(records), records, strict=True))]
    picture = svg.bars(label, bars, shown)
    return f'<figure data-plot="{plot}">{picture}{named}</figure>' + table(head, rows, kind="compare")


def time(records: Sequence[Record]) -> str:
    """The bars show single ranks, the table shows their mean."""
    found = [[s for s in facts.shares(record) if sum(s.time.values())] for record in records]
    if not any(found):
        return '<p class="none">No updates yet.</p>'
    most, bars, said = max(MOST_RANKS // len(records), 1), Bars(), []
    for key, record, shares in zip(keys_of(records), records, found, strict=True):
        shown = sorted(sorted(shares, key=lambda s: -s.own)[:most], key=lambda s: s.rank)
        bars += [(f"{key} rank {s.rank}", [s.time[kind] for kind in TIMES]) for s in shown]
        left_out = f", the {most} of {len(shares)} ranks whose own work takes longest" if len(shares) > most else ""
        if shares:
            said.append(f"<h3>{key}: {escape(record.name)}{left_out}</h3>{straggling(facts.stragglers(shares))}")

    def row(name: str, of: Callable[[list[facts.Share]], str]) -> list[str]:
        return [name, *(of(shares) if shares else _NONE for shares in found)]

    rows = [
        row(TIME[kind], lambda shares, kind=kind: facts.seconds(statistics.mean(s.time[kind] for s in shares)))  # type: ignore[misc]
        for kind in TIMES
    ]
    rows.append(row("in total", lambda shares: facts.seconds(statistics.mean(sum(s.time.values()) for s in shares))))
    rows.append(row("own work of the slowest rank", _longest))
    note = "<p>Per update. The table has the mean over the ranks of a run.</p>"
    legend = [TIME[kind] for kind in TIMES]
    return note + _compared("time", "seconds per update", records, bars, rows, facts.seconds, legend) + "".join(said)


def _longest(shares: list[facts.Share]) -> str:
    slowest = max(shares, key=lambda s: s.own)
    return f"{facts.seconds(slowest.own)} (rank {slowest.rank})"


def memory(records: Sequence[Record]) -> str:
    found = [usage.measured(record) for record in records]
    if not any(found):
        return usage.NO_PEAK
    bars, columns = Bars(), list[dict[str, str]]()
    for key, record, one in zip(keys_of(records), records, found, strict=True):
        column: dict[str, str] = {}
        columns.append(column)
        if one is None:
            continue
        plan, lines = one
        state, foreseen = usage.state_of(plan, lines), usage.predictions(plan, lines)
        bars.append((f"{key} state", [float(state[piece]) for piece in usage.PIECES]))
        for piece, name in zip(usage.PIECES, ("parameters", "gradients", "optimizer", "strategies"), strict=True):
            column[f"rank 0: {name}"] = facts.size(state[piece])
        if foreseen:
            fullest = max(foreseen, key=lambda rank: foreseen[rank])
            bars.append((f"{key} predicted", [0, 0, 0, foreseen[fullest]]))
            column["peak of a step, as predicted"] = facts.size(foreseen[fullest])
        else:
            column["peak of a step, as predicted"] = "not predicted"
        if peaks := {rank: line for rank, line in lines.items() if "peak" in line}:
            rank = max(peaks, key=lambda r: peaks[r]["peak"])
            line, before = peaks[rank], peaks[rank].get("before", 0)
            bars.append((f"{key} rank {rank}", [0, 0, 0, 0, before, max(line["peak"] - before, 0)]))
            column["peak of the fullest rank"] = f"{facts.size(line['peak'])} (rank {rank})"
            column["of that, before its first step"] = facts.size(before)
            added = facts.size(facts.of_step(line, plan, usage.on_gpu(record)))
            column["what training added, with the parameters"] = added
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [[name, *(column.get(name, _NONE) for column in columns)] for name in names]
    drawn = _compared("memory", "bytes", records, bars, rows, facts.size, usage.LEGEND)
    return usage.notes(records) + drawn


def network(records: Sequence[Record]) -> str:
    found = [[s for s in facts.shares(record) if s.sent is not None] for record in records]
    if not any(found):
        return usage.NO_BYTES
    most, bars = max(MOST_RANKS // len(records), 1), Bars()
    rows = [["most of any rank, per update"], ["of all ranks, per update"], ["bytes of all ranks, in total"]]
    for key, record, shares in zip(keys_of(records), records, found, strict=True):
        bars += [(f"{key} rank {s.rank}", [s.sent or 0.0]) for s in shares[:most]]
        sent = [s.sent or 0.0 for s in shares]
        in_all = sum(record.ranks[s.rank][-1]["sent"] for s in shares)
        told = (facts.size(max(sent)), facts.size(sum(sent)), f"{in_all:,}") if sent else (_NONE,) * 3
        for row, cell in zip(rows, told, strict=True):
            row.append(cell)
    return _compared("network", "bytes sent per update", records, bars, rows, facts.size)
