"""The sections of the page. Everything that comes from a record is escaped."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import yaml

from fleetx.record.read import Record
from fleetx.record.schema import EVENTS, TIMES
from fleetx.report import facts, svg, timeline
from fleetx.report.svg import Series

MOST_RANKS = 24  # bars; with more ranks, only those whose own work takes longest are shown
_TITLES = {
    "loss": "loss", "rate": "learning rate", "norm": "norm of the gradient", "scale": "loss scale",
    "k": "k, updates between averages", "throughput": "samples per second", "sent": "bytes sent by rank 0",
}  # fmt: skip
TIME = {
    "data": "data", "forward_backward": "forward and backward", "communication": "waiting for other ranks",
    "update": "update", "other": "evaluating, saving",
}  # fmt: skip


def overview(records: Sequence[Record]) -> str:
    found = [facts.summary(record) for record in records]
    if len(found) == 1:
        items = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in found[0].items())
        return f'<dl class="tiles">{items}</dl>'
    keys = list(dict.fromkeys(key for one in found for key in one))
    head = ["", *(f"{key}: {record.name}" for key, record in zip(keys_of(records), records, strict=True))]
    return table(head, [[key, *(one.get(key, "") for one in found)] for key in keys], kind="compare")


def keys_of(records: Sequence[Record]) -> list[str]:
    """A letter for each run, to label it where there is no room for its name; a number if letters run out."""
    return [chr(ord("A") + i) if i < 26 else str(i + 1) for i in range(len(records))]


def curves(records: Sequence[Record]) -> str:
    found = [facts.curves(record) for record in records]
    names = list(dict.fromkeys(name for one in found for name in one))
    plots = []
    for name in names:
        here = [Series(r.name, one[name]) for r, one in zip(records, found, strict=True) if name in one]
        picture = svg.curve(name, here) + "".join(_odd(s, len(here) > 1) for s in here)
        plots.append(figure(name, _TITLES.get(name, name), picture, _numbers(here), [s.name for s in here]))
    return f'<div class="plots">{"".join(plots)}</div>' if plots else '<p class="none">No updates yet.</p>'


def _odd(series: Series, named: bool) -> str:
    """Report values that a curve cannot show: those that are not finite."""
    odd = [x for x, y in series.points if not math.isfinite(y)]
    if not odd:
        return ""
    whose = f"{escape(series.name)}: " if named else ""
    return f"<p>{whose}{len(odd)} not finite (crosses), first at update {odd[0]:g}</p>"


def figure(key: str, title: str, picture: str, numbers: str, names: Sequence[str] = ()) -> str:
    shown = svg.legend(names, lines=True) if len(names) > 1 else ""
    return (
        f'<figure data-plot="{escape(key)}"><figcaption>{escape(title)}</figcaption>{picture}{shown}'
        f"<details><summary>numbers</summary>{numbers}</details></figure>"
    )


def _numbers(series: Sequence[Series]) -> str:
    # Exactly as in the record, so that nobody has to trust the plot.
    rows = [
        [*([s.name] if len(series) > 1 else []), f"{x:g}", repr(y)] for s in series for x, y in svg.thinned(s.points)
    ]
    return table([*(["run"] if len(series) > 1 else []), "update", "value"], rows, kind="numbers")


def where_time_goes(record: Record) -> str:
    found = facts.shares(record)
    if not found or not any(sum(s.time.values()) for s in found):
        return '<p class="none">No updates yet.</p>'
    shown = sorted(sorted(found, key=lambda s: -s.own)[:MOST_RANKS], key=lambda s: s.rank)
    picture = svg.bars(
        "seconds per update of each rank",
        [(f"rank {s.rank}", [s.time[k] for k in TIMES]) for s in shown],
        facts.seconds,
    )
    rows = [[f"rank {s.rank}", *(facts.seconds(s.time[k]) for k in TIMES), s.host] for s in shown]
    left_out = f"<p>The {MOST_RANKS} of {len(found)} ranks whose own work takes longest.</p>" if shown != found else ""
    slow = facts.stragglers(found)
    return (
        f"{straggling(slow)}{left_out}"
        f'<figure data-plot="time">{picture}{svg.legend([TIME[k] for k in TIMES])}</figure>'
        + table(["per update", *(TIME[k] for k in TIMES), "host"], rows, kind="compare")
    )


def straggling(slow: Sequence[tuple[facts.Share, float]]) -> str:
    if not slow:
        return "<p>No rank straggles: the ranks' own work takes equally long, within 10%.</p>"
    said = []
    for share, ratio in slow[:5]:
        most = max(("data", "forward_backward", "update"), key=lambda k: share.time[k])
        said.append(
            f"<li><strong>rank {share.rank}</strong> ({escape(share.host)}): its own work takes {ratio:.2f} times as "
            f"long as that of the others, mostly {TIME[most]} ({facts.seconds(share.time[most])})</li>"
        )
    more = f"<li>and {len(slow) - 5} more</li>" if len(slow) > 5 else ""
    return f'<p>The others wait for:</p><ul class="stragglers">{"".join(said)}{more}</ul>'


# Boxes of a planned update: what happens, and the stages whose acts belong to it.
_FLOW = (
    ("set-up, once", ("MODEL",)), ("forward", ("FORWARD",)), ("forward and backward in stages", ("SCHEDULE",)),
    ("backward", ("LOSS", "GATE")), ("between ranks", ("REDUCE", "WIRE")), ("gradient", ("GRADIENT",)),
    ("update", ("UPDATE",)), ("after the update", ("PARAMETER",)),
)  # fmt: skip


def planned_step(plan: dict[str, Any]) -> str:
    """The boxes of an update, in order. Those that compute have a solid border, those that communicate a dashed one."""
    staged = any(stage == "SCHEDULE" for stage, *_ in plan["acts"])
    always = ("update",) if staged else ("forward", "backward", "update")
    boxes = []
    for name, stages in _FLOW:
        acts = [(switch, meaning) for stage, switch, meaning in plan["acts"] if stage in stages]
        if (
            name == "between ranks"
            and plan["replicas"] > 1
            and not any(stage == "REDUCE" for stage, *_ in plan["acts"])
        ):
            acts.insert(0, ("data_parallel", "average the gradients, while backward runs"))
        if not acts and name not in always:
            continue
        times = f", {plan['window']} times" if plan["window"] > 1 and name in ("forward", "backward") else ""
        items = "".join(f"<li><strong>{escape(switch)}</strong>: {escape(meaning)}</li>" for switch, meaning in acts)
        kind = "net" if name in ("between ranks", "forward and backward in stages") else ""
        boxes.append(f'<li class="{kind}">{name}{times}<ul>{items}</ul></li>')
    return f'<ol class="flow">{"".join(boxes)}</ol>'


def one_step(record: Record) -> str:
    planned = [planned_step(plan) for _, plan in sorted(record.plans.items())]
    as_planned = f"<p>As planned; dashed boxes wait for other ranks.</p>{''.join(planned)}" if planned else ""
    traces = facts.step_traces(record)
    which = f"<p>Update {traces[0]['round']}, as measured.</p>" if traces else ""
    picture = timeline.step(traces)
    figure = f'<figure data-plot="step"><div class="scroll">{picture}</div>{svg.legend(timeline.LEGEND)}</figure>'
    return as_planned + which + figure


def events(record: Record) -> str:
    picture = f'<figure data-plot="events"><div class="scroll">{timeline.events(record)}</div></figure>'
    rows = [
        [time.strftime("%H:%M:%S", time.gmtime(e["t"])), str(e["round"]), str(e["rank"]), e["what"],
         e.get("text", EVENTS.get(e["what"], ""))]
        for e in record.events[-200:]
    ]  # fmt: skip
    return picture + table(["UTC", "update", "rank", "event", ""], rows)


def plan(record: Record) -> str:
    made = []
    for number, line in sorted(record.plans.items()):
        name = f"<h3>Model {number}: {escape(line['name'])}</h3>" if len(record.plans) > 1 else ""
        made.append(
            name + table(["stage", "strategy", "what it does"], line["acts"])
            + f"<details><summary>with reasons and costs</summary><pre>{escape(line['explain'])}</pre></details>"
        )  # fmt: skip
    return "".join(made) or '<p class="none">Nothing is distributed yet.</p>'


def repeat(record: Record) -> str:
    start = record.starts[-1]
    rows = [
        ["command", shlex.join(start["command"])], ["folder", start["folder"]],
        ["versions", ", ".join(f"{name} {version}" for name, version in start["versions"].items())],
        ["machine", f"{start['host']}, {start['machine']}, {start['threads']} threads per rank"],
        ["environment", " ".join(f"{k}={shlex.quote(v)}" for k, v in start["environment"].items())],
        ["attempts", str(len([s for s in record.starts if s["rank"] == 0]))],
    ]  # fmt: skip
    strategies = [
        f"<pre>{escape(yaml.safe_dump(line['strategy'], sort_keys=False) if line['strategy'] else '# plain')}</pre>"
        for _, line in sorted(record.plans.items())
    ]
    return table(["", ""], rows) + "<p>strategy.yaml:</p>" + "".join(strategies)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], kind: str = "") -> str:
    top = "".join(f"<th>{escape(str(cell))}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table class="{kind}"><tr>{top}</tr>{body}</table></div>'
