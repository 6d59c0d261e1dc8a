"""Pictures over time: one step on every rank, and the events of a run."""

from __future__ import annotations

from html import escape
from typing import Any

from fleetx.record.read import Record, RecordLine
from fleetx.record.schema import EVENTS
from fleetx.report import facts, svg

_WIDTH, _LEFT, _ROW, _LETTER = 720, 112, 22, 6.6
_LANES = {"compute": "computes", "stage": "stages", "wait": "waits", "act": "strategies"}
_FILL = {"data": 0, "forward": 1, "loss": 2, "backward": 3, "update": 4, "forward and backward": 1}
_SIGNS = {
    "overflow": "o", "skipped": "s", "checkpoint": "c", "resumed": "r", "restored": "b", "restart": "R", "fault": "!",
    "end": "e",
}  # fmt: skip
LEGEND = ("data", "forward, F", "loss", "backward, B", "update", "waits, strategies")


def step(traces: list[RecordLine]) -> str:
    """When each rank computes and when it waits, by its own clock."""
    if not traces:
        return '<p class="none">No step has been traced yet: tracing begins with the third.</p>'
    begin = min(t["t"] for t in traces)
    end = max(t["t"] + start + seconds for t in traces for *_, start, seconds in t["spans"])
    across = (_WIDTH - _LEFT - 8) / max(end - begin, 1e-9)
    parts, y = [], 4
    for trace in traces:
        offset = trace["t"] - begin
        for lane, name in _LANES.items():
            spans = [span for span in _visible(trace["spans"]) if span[0] == lane]
            if not spans:
                continue
            parts.append(svg.text(_LEFT - 6, y + 13, f"rank {trace['rank']} {name}", "end"))
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y + 18}" y2="{y + 18}"/>')
            for _, what, start, seconds in spans:
                x, wide = _LEFT + (offset + start) * across, seconds * across
                title = (
                    f"rank {trace['rank']}: {what}, {facts.seconds(seconds)} from {facts.seconds(offset + start)} on"
                )
                parts.append(
                    f'<rect class="piece p{_fill(lane, what)}" x="{x:.2f}" y="{y}" width="{max(wide, 0.5):.2f}" '
                    f'height="16"><title>{escape(title)}</title></rect>'
                )
                short = what.partition("/")[0] if lane == "stage" else what
                if wide > _LETTER * len(short) + 4:
                    parts.append(svg.text(x + wide / 2, y + 12, short, "middle", "on"))
            y += _ROW
        y += 6
    parts += [_tick(i, _LEFT, across * (end - begin), y, facts.seconds((end - begin) * i / 4)) for i in range(5)]
    label = f"one update on {len(traces)} ranks, {facts.seconds(end - begin)}"
    return svg.drawing(label, _WIDTH, y + 18, parts, "wide")


def _tick(i: int, left: float, wide: float, y: float, label: str) -> str:
    """The i-th of five labels under a timeline. The outer ones are aligned to stay inside the picture."""
    return svg.text(left + wide * i / 4, y + 12, label if i else "0", ("start", *["middle"] * 3, "end")[i])


def _visible(spans: list[list[Any]]) -> list[list[Any]]:
    """Under a pipeline, hide the spans around its stages, which say more."""
    staged = any(lane == "stage" for lane, *_ in spans)
    return [span for span in spans if not (staged and span[1] in ("forward and backward", "forward", "loss"))]


def _fill(lane: str, what: str) -> int:
    if lane == "stage":
        return 1 if what.startswith("F") else 3
    return 5 if lane in ("wait", "act") else _FILL.get(what, 2)


def events(record: Record) -> str:
    """The events of a run on a time axis."""
    begin = record.starts[0]["t"]
    end = max([begin + 1e-3, *(line["t"] for line in (*record.rounds[-1:], *record.events))])
    kinds = [kind for kind in EVENTS if any(e["what"] == kind for e in record.events)]
    if not kinds:
        return '<p class="none">No events yet.</p>'
    across, parts = (_WIDTH - _LEFT - 20) / (end - begin), []
    for row, kind in enumerate(kinds):
        y = 4 + row * _ROW
        parts.append(svg.text(_LEFT - 6, y + 13, kind, "end"))
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - 8}" y1="{y + 9}" y2="{y + 9}"/>')
        for event in (e for e in record.events if e["what"] == kind):
            x = _LEFT + 6 + (event["t"] - begin) * across
            said = f"update {event['round']}, rank {event['rank']}: {event.get('text', EVENTS[kind])}"
            parts.append(
                f'<g><circle class="event" cx="{x:.1f}" cy="{y + 9}" r="7"><title>{escape(said)}</title></circle>'
                f"{svg.text(x, y + 13, _SIGNS[kind], 'middle', 'on')}</g>"
            )
    y = 4 + len(kinds) * _ROW
    parts += [_tick(i, _LEFT + 6, across * (end - begin), y, facts.duration((end - begin) * i / 4)) for i in range(5)]
    return svg.drawing(f"{len(record.events)} events", _WIDTH, y + 18, parts, "wide")
