"""The page itself, and the command that writes it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from fleetx.base.files import write_atomic
from fleetx.errors import UsageError
from fleetx.record.read import NotBegunError, Record, read
from fleetx.report import compare, facts, sections, svg, usage
from fleetx.report.style import STYLE

LIVE = 5  # seconds between rewrites of a live page, and between reloads
_USE: tuple[tuple[str, Callable[[Record], str], Callable[[Sequence[Record]], str]], ...] = (
    ("Where the time of an update goes", sections.where_time_goes, compare.time),
    ("Memory", usage.memory, compare.memory),
    ("Network", usage.network, compare.network),
)  # for one run, and for several side by side
_OF_A_RUN: tuple[tuple[str, Callable[[Record], str]], ...] = (
    ("One update", sections.one_step),
    ("Events", sections.events),
    ("The plan, and why", sections.plan),
    ("To repeat it", sections.repeat),
)


def write(
    folders: Sequence[str | Path], output: Path, *, live: bool = False, say: Callable[[str], object] = print
) -> None:
    """Write the page of these runs. live: wait until all have begun, then rewrite it until all have ended."""
    waiting = False
    while True:
        try:
            records = [read(folder) for folder in folders]
        except NotBegunError as error:
            if not live:
                raise
            if not waiting:
                say(f"waiting for a run to begin: {error}")
            waiting = True
            time.sleep(LIVE)
            continue
        going = live and any(facts.state(record).startswith("running") for record in records)
        try:
            write_atomic(output, page(records, refresh=LIVE if going else None))
        except OSError as error:
            raise UsageError(f"{output} cannot be written: {error.strerror}") from None
        if not going:
            return
        time.sleep(LIVE)


def page(records: Sequence[Record], *, refresh: int | None = None) -> str:
    names = ", ".join(record.name for record in records)
    first = min(record.starts[0]["t"] for record in records)
    begun = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(first))
    again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    body = [f"<h1>{escape(names)}</h1><p>fleetx, begun {begun}</p>", sections.overview(records)]
    body += [
        f"<p>Lines of {escape(record.name)} that cannot be read are left out ({record.unreadable}): they were cut off "
        "when a process was killed, or another program wrote them.</p>"
        for record in records
        if record.unreadable
    ]
    body += ["<section><h2>Curves</h2>", sections.curves(records), "</section>"]
    for title, of_one, of_several in _USE:
        told = of_one(records[0]) if len(records) == 1 else of_several(records)
        body.append(f"<section><h2>{title}</h2>{told}</section>")
    for key, record in zip(sections.keys_of(records), records, strict=True):
        if len(records) > 1:
            body.append(f'<h2 class="run">{key}: {escape(record.name)}</h2>')
        level = 3 if len(records) > 1 else 2
        for title, section in _OF_A_RUN:
            body.append(f"<section><h{level}>{title}</h{level}>{section(record)}</section>")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{again}'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>{escape(names)}</title><style>{STYLE}</style></head>'
        f"<body>{svg.patterns()}<main>{''.join(body)}</main></body></html>\n"
    )
