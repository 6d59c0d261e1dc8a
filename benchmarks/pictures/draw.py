"""Lines and bars as SVG on a white ground, 720 wide. Names stand beside what they name, in its colour."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH = 720
INK, PALE, OURS, THEIRS = "#1f2328", "#d8dee4", "#0969da", "#8c959f"
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    name: str
    points: Sequence[Point]  # where they are in the picture is for the axes to say
    colour: str
    dashed: bool = False


@dataclass(frozen=True)
class Axes:
    """Maps values to places; ticks are values with their labels."""

    x: Callable[[float], float]
    y: Callable[[float], float]
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    left: float
    right: float
    bottom: float


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    label: str
    colour: str


def lines(axes: Axes, drawn: Sequence[Line], *, names_at: int) -> list[str]:
    """`names_at`: 0 puts the names left of the first points, -1 right of the last ones."""
    parts = []
    for value, label in axes.y_ticks:
        y = axes.y(value)
        parts.append(f'<path d="M{axes.left:.0f} {y:.1f}H{axes.right:.0f}" stroke="{PALE}"/>')
        at, anchor = (axes.left - 8, "end") if names_at else (axes.right + 8, "start")
        parts.append(text(at, y + 4, label, anchor=anchor))
    parts += [text(axes.x(value), axes.bottom + 20, label, anchor="middle") for value, label in axes.x_ticks]
    for line in drawn:
        places = [(axes.x(x), axes.y(y)) for x, y in line.points]
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path d="{path}" fill="none" stroke="{line.colour}" stroke-width="2.5"{dash}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{line.colour}"/>' for x, y in places]
    ends = [axes.y(line.points[names_at][1]) for line in drawn]
    at, anchor = (axes.right + 12, "start") if names_at else (axes.left - 12, "end")
    for line, y in zip(drawn, apart(ends, 18), strict=True):
        parts.append(text(at, y + 4, line.name, anchor=anchor, colour=line.colour, bold=True))
    return parts


def bars(
    groups: Sequence[tuple[str, Sequence[Bar]]], *, top: float, left: float, right: float
) -> tuple[list[str], float]:
    """Groups of horizontal bars, each group on a scale of its own; also where they end."""
    parts, y = [], top
    for title, group in groups:
        parts.append(text(16, y + 12, title, bold=True))
        y += 22
        most = max(bar.value for bar in group)
        for bar in group:
            wide = bar.value / most * (right - left)
            parts.append(text(left - 10, y + 15, bar.name, anchor="end"))
            parts.append(f'<rect x="{left}" y="{y}" width="{wide:.1f}" height="20" rx="3" fill="{bar.colour}"/>')
            parts.append(text(left + wide + 8, y + 15, bar.label))
            y += 25
        y += 12
    return parts, y


def apart(places: Sequence[float], least: float) -> list[float]:
    """The same places, moved until neighbours are `least` apart, as little as a few rounds manage."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = list(places)
    for _ in range(50):
        for a, b in pairwise(order):
            if (lack := least - (moved[b] - moved[a])) > 0:
                moved[a] -= lack / 2
                moved[b] += lack / 2
    return moved


def text(
    x: float, y: float, content: str, *, anchor: str = "start", colour: str = INK, bold: bool = False, size: int = 14
) -> str:
    weight = ' font-weight="600"' if bold else ""
    style = f'text-anchor="{anchor}" fill="{colour}" font-size="{size}"{weight}'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(content)}</text>'


def picture(title: str, under: str, height: float, parts: Sequence[str]) -> str:
    font = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" font-family="{font}" role="img" aria-label="{escape(title)}">',
        f'<rect width="{WIDTH}" height="{height:.0f}" rx="6" fill="#ffffff"/>',
        text(16, 30, title, bold=True, size=18),
        text(16, 52, under, colour="#59636e"),
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"
