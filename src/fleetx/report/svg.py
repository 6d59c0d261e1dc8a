"""Plots as SVG, 360 wide, readable on a phone. Dashes and patterns tell series apart, not only colors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from fleetx.report.facts import Points, thinned

WIDTH, HEIGHT = 360, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 10, 10, 26
DASHES = ("", "6 3", "2 3", "9 3 2 3", "1 5", "12 4")
PATTERNS = 6


@dataclass(frozen=True)
class Series:
    name: str
    points: Points = field(repr=False)


def curve(name: str, series: Sequence[Series]) -> str:
    """Lines over rounds. Values that are not finite leave a gap with a cross above it."""
    drawn = [Series(s.name, thinned(s.points)) for s in series]
    finite = [(x, y) for s in drawn for x, y in s.points if math.isfinite(y)]
    if not finite:
        return f'<p class="none">{escape(name)}: no value is finite.</p>'
    low_x, high_x = min(x for s in drawn for x, _ in s.points), max(x for s in drawn for x, _ in s.points)
    low, high, ticks = scale(min(y for _, y in finite), max(y for _, y in finite))

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - low_x) / (high_x - low_x) if high_x > low_x else 0.5
        up = (y - low) / (high - low)
        return _LEFT + across * (WIDTH - _LEFT - _RIGHT), HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM)

    parts = [_grid(ticks, lambda y: at(low_x, y)[1])]
    ends = ((low_x, "start"), (high_x, "end")) if high_x > low_x else ()
    parts += [text(at(x, low)[0], HEIGHT - 8, f"{x:g}", anchor) for x, anchor in ends]
    parts.append(text((WIDTH + _LEFT) / 2, HEIGHT - 8, "update" if ends else f"update {low_x:g}", "middle"))
    for i, s in enumerate(drawn):
        for piece in _pieces(s.points):
            places = [at(x, y) for x, y in piece]
            style = f'class="line c{i % PATTERNS}" stroke-dasharray="{DASHES[i % len(DASHES)]}"'
            if len(places) == 1:
                parts.append(
                    f'<circle class="dot c{i % PATTERNS}" cx="{places[0][0]:.1f}" cy="{places[0][1]:.1f}" r="3"/>'
                )
            else:
                parts.append(f'<polyline {style} points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>')
        for x, y in s.points:
            if not math.isfinite(y):
                cross = f"M{at(x, low)[0] - 3:.1f} {_TOP - 3}l6 6m0 -6l-6 6"
                parts.append(f'<path class="line c{i % PATTERNS}" d="{cross}"/>')
    first, last = finite[0], finite[-1]
    label = f"{name}: {first[1]:.4g} at update {first[0]:g}, {last[1]:.4g} at update {last[0]:g}"
    return drawing(label, WIDTH, HEIGHT, parts)


def bars(label: str, rows: Sequence[tuple[str, Sequence[float]]], shown: Callable[[float], str]) -> str:
    """A horizontal bar per row, made of several pieces, with its total next to it."""
    most = max((sum(values) for _, values in rows), default=0.0) or 1.0
    left = max(64.0, 14 + 6.2 * max((len(name) for name, _ in rows), default=0))
    right, height = 62, 22
    parts = []
    for i, (name, values) in enumerate(rows):
        y, x = 4 + i * height, float(left)
        parts.append(text(left - 6, y + 13, name, "end"))
        for kind, value in enumerate(values):
            wide = value / most * (WIDTH - left - right)
            if wide > 0:
                parts.append(
                    f'<rect class="piece p{kind % PATTERNS}" x="{x:.1f}" y="{y}" width="{wide:.1f}" height="16"/>'
                )
            x += wide
        parts.append(text(x + 5, y + 13, shown(sum(values)), "start"))
    return drawing(label, WIDTH, 8 + len(rows) * height, parts, "bars")


def legend(names: Sequence[str], *, lines: bool = False) -> str:
    items = []
    for i, name in enumerate(names):
        if lines:
            dash = DASHES[i % len(DASHES)]
            mark = f'<line class="line c{i % PATTERNS}" stroke-dasharray="{dash}" x1="0" y1="6" x2="26" y2="6"/>'
        else:
            mark = f'<rect class="piece p{i % PATTERNS}" x="1" y="1" width="24" height="10"/>'
        items.append(f'<li><svg width="26" height="12" aria-hidden="true">{mark}</svg> {escape(name)}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def drawing(label: str, width: float, height: float, parts: Sequence[str], kind: str = "") -> str:
    shape = f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}"'
    return f'<svg class="{kind}" {shape}>{"".join(parts)}</svg>'


def text(x: float, y: float, content: str, anchor: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def patterns() -> str:
    """Fills that can be told apart in black and white. A page needs them once."""
    marks = [
        "", '<path d="M0 6L6 0" class="hatch"/>', '<circle cx="3" cy="3" r="1.2" class="hatch-dot"/>',
        '<path d="M0 3H6" class="hatch"/>', '<path d="M0 0L6 6M0 6L6 0" class="hatch"/>',
        '<path d="M3 0V6" class="hatch"/>',
    ]  # fmt: skip
    made = [
        f'<pattern id="p{i}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" class="ground c{i}"/>{mark}</pattern>'
        for i, mark in enumerate(marks)
    ]
    return f'<svg width="0" height="0" aria-hidden="true" class="defs"><defs>{"".join(made)}</defs></svg>'


def scale(low: float, high: float) -> tuple[float, float, list[float]]:
    """Axis limits around these values, and round numbers for the ticks between them."""
    if high <= low:
        room = abs(low) / 10 or 1.0
        low, high = low - room, high + room
    raw = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return min(first * step, low), max(last * step, high), [i * step for i in range(first, last + 1)]


def _grid(ticks: Sequence[float], at: Callable[[float], float]) -> str:
    parts = []
    for tick, label in zip(ticks, labels(ticks), strict=True):
        y = at(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(text(_LEFT - 6, y + 4, label, "end"))
    return "".join(parts)


def labels(ticks: Sequence[float]) -> list[str]:
    """With as few digits as keep the error below 1 % of the range, and at most 6: there is room for 7 characters."""
    room = abs(ticks[-1] - ticks[0]) / 100
    for digits in range(1, 7):
        shown = [_short(tick, digits) for tick in ticks]
        if all(abs(float(label) - tick) <= room for label, tick in zip(shown, ticks, strict=True)):
            break
    return shown


def _short(value: float, digits: int) -> str:
    """12500 or 2.5e7, whichever is shorter."""
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    if abs(value) < 1e-300 or not float(mantissa):
        return "0"
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    plain = f"{float(f'{value:.{digits - 1}e}'):.{max(digits - 1 - int(power), 0)}f}"
    plain = plain.rstrip("0").rstrip(".") if "." in plain else plain
    return plain if len(plain) <= 6 else min(plain, f"{mantissa}e{int(power)}", key=len)


def _pieces(points: Points) -> list[Points]:
    pieces: list[Points] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            pieces[-1].append(point)
        elif pieces[-1]:
            pieces.append([])
    return [piece for piece in pieces if piece]
