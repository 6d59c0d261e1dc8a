"""The result of `fleetx verify` as text, HTML and JSON."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

import torch

from fleetx import __version__
from fleetx.errors import UsageError
from fleetx.verify.combinations import (
    Switches,
    conflicts_of,
    declared,
    kind_of,
    unbuilt_beside_others,
    unbuilt_messages,
)
from fleetx.verify.judge import Verdict

SIGNS = {"equal": "=", "lossy": "~", "refused": "x", "unbuilt": "o", "failed": "!"}
LEGEND = [
    "= equal to one plain float64 process, up to rounding",
    "~ lossy: equal up to rounding at lossless settings, and within its bound at lossy ones",
    "x raises an error: a contradiction",
    "o raises an error: not supported yet",
    "! failed",
]


def matrix(verdicts: Iterable[Verdict]) -> list[list[str]]:
    """A square table of signs: every strategy alone on the diagonal, every pair below it."""
    kinds = {frozenset(v.switches): v.kind for v in verdicts if len(v.switches) in (1, 2)}
    names = sorted({name for pair in kinds for name in pair})
    rows = [["", *(str(i + 1) for i in range(len(names)))]]
    for i, name in enumerate(names):
        signs = [SIGNS.get(kinds.get(frozenset({name, other}), ""), " ") for other in names[: i + 1]]
        rows.append([f"{i + 1} {name}", *signs, *[""] * (len(names) - i - 1)])
    return rows


def text(verdicts: Sequence[Verdict]) -> str:
    """For the terminal: the matrix, what failed, and a summary."""
    rows = matrix(verdicts)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += ["", *LEGEND, ""] if len(rows) > 1 else []
    lines += [f"FAILED  {_name(v)}: {v.reason.strip()}" for v in verdicts if not v.ok]
    return "\n".join([*lines, summary(verdicts)])


def summary(verdicts: Sequence[Verdict]) -> str:
    counts = {kind: sum(v.kind == kind for v in verdicts) for kind in SIGNS}
    seen = sum(e.acts is True for v in verdicts for e in v.effects.values())
    return (
        f"{len(verdicts)} combinations: {counts['equal']} equal, {counts['lossy']} lossy within bounds, "
        f"{counts['refused']} contradiction{'' if counts['refused'] == 1 else 's'} and "
        f"{counts['unbuilt']} not supported yet (both raise an error), "
        f"{counts['failed']} failed; {seen} effects observed"
    )


def details(verdict: Verdict) -> list[str]:
    """One combination in words."""
    if not verdict.ran:
        return [f"{_name(verdict)}: raises an error: {verdict.reason}"]
    how = f"off by {verdict.error:.1e} of the distance trained (bound {verdict.bound:.0e}, {verdict.dtype})"
    if verdict.acting_bound:
        how += f", at lossy settings by {verdict.acting_error:.1e} (bound {verdict.acting_bound:.0e})"
    lines = [f"{_name(verdict)}: {verdict.kind}: {how}, on {verdict.ranks} ranks"]
    for switch, seen in verdict.effects.items():
        acts = {True: seen.sentence, False: "DOES NOT ACT", None: "cannot be seen with so few replicas"}[seen.acts]
        lines.append(f"  {switch}: {acts} ({seen.quantity}: {seen.on:g}, without it {seen.off:g})")
    return lines + ([f"  {verdict.reason}"] if verdict.reason else [])


def _name(verdict: Verdict) -> str:
    return " + ".join(verdict.switches) or "plain data parallelism"


def as_json(verdicts: Sequence[Verdict], device: str, seconds: float) -> str:
    head = {"fleetx": __version__, "torch": torch.__version__, "device": device, "seconds": round(seconds, 1)}
    return json.dumps(head | {"combinations": [asdict(v) for v in verdicts]}, indent=1) + "\n"


def markdown(verdicts: Sequence[Verdict], device: str, seconds: float) -> str:
    """The matrix, how each strategy is observed, and why pairs raise an error."""
    rows = matrix(verdicts)
    lines = [
        "# What combines with what",
        "",
        f"Made by `fleetx verify`: {_made(device, seconds)}. {summary(verdicts)}.",
        "",
    ]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(5, "|" + " --- |" * len(rows[0]))
    lines += ["", "; ".join(LEGEND) + ".", ""]
    if triples := [v for v in verdicts if len(v.switches) > 2]:
        lines += [f"Of these, {len(triples)} are triples: {summary(triples)}.", ""]
    lines += [f"- FAILED {_name(v)}: {v.reason.strip()}" for v in verdicts if not v.ok]
    lines += [*_exactness(verdicts), ""]
    lines += ["## How each strategy is observed", ""]
    lines += ["| strategy | seen | with it | without it |", "| --- | --- | --- | --- |"]
    for v in (v for v in verdicts if len(v.switches) == 1):
        seen = v.effects[v.switches[0]]
        lines.append(f"| {v.switches[0]} | {seen.sentence} (`{seen.quantity}`) | {seen.on:g} | {seen.off:g} |")
    return "\n".join(lines) + "\n\n" + conflicts([v.switches for v in verdicts])


_CONFLICTS = "## Contradictions\n"  # the page's last sections begin here


def conflicts(chosen: Iterable[Switches]) -> str:
    """The end of the page: the errors of these pairs, and everything that is not supported yet. Trains nothing."""
    found: dict[str, list[str]] = {"refused": [], "unbuilt": []}
    for pair in (switches for switches in chosen if len(switches) == 2):
        if problems := conflicts_of(declared(pair)):
            found[kind_of(problems)].append(f"- {' + '.join(pair)}: {'; '.join(problems)}")
    lines = [_CONFLICTS, *found["refused"], "", "## Not supported yet", "", *found["unbuilt"]]
    lines += [f"- {problem}" for problem in unbuilt_beside_others()]
    lines += ["", "Settings and models, whatever they are combined with:", ""]
    lines += [f"- {text}" for text in unbuilt_messages()]
    return "\n".join(lines) + "\n"


def with_conflicts(page: str, chosen: Iterable[Switches]) -> str:
    """A page that `markdown` has written, with the conflicts as they are now."""
    measured, heading, _ = page.partition(_CONFLICTS)
    if not heading:
        raise UsageError(f"it has no heading {_CONFLICTS.strip()!r}: pass a page that fleetx verify has written")
    return measured + conflicts(chosen)


def _exactness(verdicts: Sequence[Verdict]) -> list[str]:
    """How close the runs came to the oracle, by kind of comparison."""
    lines = [
        "## How close",
        "",
        "Distance to one plain float64 process, as a share of the distance trained. A lossy strategy is compared at "
        "lossless settings: `amp` scales and unscales but runs products in float32, `dgc` has a sparsity of 0. "
        "`fp16_allreduce` stays on, and the plain process casts too. `amp` is also compared at lossy settings. `dgc` "
        "is not: what it does not send now it sends later, so it has no bound after a few steps "
        "(`tests/parts/test_dgc.py` has its formula). Where float32 rounds differently, `fp16_allreduce` casts "
        "differently, which `muon` amplifies.",
        "",
        "| compared | combinations | largest distance | bound |",
        "| --- | ---: | ---: | ---: |",
    ]
    ran = [v for v in verdicts if v.ran]
    usual = {v.dtype: min(w.bound for w in ran if w.dtype == v.dtype) for v in ran}
    rows = [
        (f"in {v.dtype}, {'where nothing is lost' if v.bound == usual[v.dtype] else _name(v)}", v.error, v.bound)
        for v in ran
    ]
    for v in (v for v in ran if v.acting_bound):
        rows.append((f"at lossy settings{', beside `muon`' * ('muon' in v.switches)}", v.acting_error, v.acting_bound))
    for what in dict.fromkeys(sorted(what for what, *_ in rows)):
        same = [(error, bound) for name, error, bound in rows if name == what]
        lines.append(f"| {what} | {len(same)} | {max(same)[0]:.1e} | {max(bound for _, bound in same):.0e} |")
    return lines


def _made(device: str, seconds: float) -> str:
    return f"fleetx {__version__}, torch {torch.__version__}, {device}, {seconds:.0f} s"


_STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}td,th{border:1px solid #ccc;padding:.2rem .55rem;text-align:center}
th:first-child,td.name{text-align:left;white-space:nowrap}td.equal{background:#cdebc5}td.lossy{background:#fdf0b8}
td.refused{background:#e4e4e4}td.unbuilt{background:#d3e0f5}td.failed{background:#f6b8b0;font-weight:bold}pre{white-space:pre-wrap;font-size:13px}
@media(prefers-color-scheme:dark){body{background:#181818;color:#ddd}td,th{border-color:#555}td.equal{background:#24551b}
td.lossy{background:#5d5210}td.refused{background:#3a3a3a}td.unbuilt{background:#26395c}td.failed{background:#7a2018}}"""


def page(verdicts: Sequence[Verdict], device: str, seconds: float) -> str:
    """One HTML page without scripts: the matrix, with the details of each combination below it."""
    kinds = {sign: kind for kind, sign in SIGNS.items()}
    body: list[str] = []
    for number, row in enumerate(matrix(verdicts)):
        if number == 0:
            body.append("<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in row) + "</tr>")
            continue
        cells = [f'<td class="{kinds.get(cell, "")}">{html.escape(cell)}</td>' for cell in row[1:]]
        body.append(f'<tr><td class="name">{html.escape(row[0])}</td>{"".join(cells)}</tr>')
    said = html.escape("\n".join(line for v in verdicts for line in details(v)))
    head = _made(device, seconds)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>fleetx verify</title><style>{_STYLE}</style>'
        f"<h1>fleetx verify</h1><p>{html.escape(head)}<br>{html.escape(summary(verdicts))}</p>"
        f"<table>{''.join(body)}</table><p>{'<br>'.join(map(html.escape, LEGEND))}</p>"
        f"<h2>Every combination</h2><pre>{said}</pre></html>\n"
    )


FORMATS = {".html": page, ".json": as_json, ".md": markdown}
