"""Draws the pictures of docs/recording.md: python tests/report/pictures.py RUN [SCREEN]

RUN is the folder of a record. SCREEN is a terminal with its colours: tmux capture-pane -p -e > SCREEN
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from chromium import Chromium
from rich.console import Console
from rich.text import Text

from fleetx.record.read import read
from fleetx.report import page

OUT = Path(__file__).parent.parent.parent / "docs" / "results"
SHAPES = {"light": (1200, 900, False), "dark": (1200, 900, True), "phone": (380, 900, False)}


def terminal(text: str) -> tuple[str, int, int]:
    """A screen as SVG with its size, without the font that rich would load from the network."""
    lines = text.rstrip().splitlines()
    console = Console(record=True, width=max(Text.from_ansi(line).cell_len for line in lines) + 2, file=io.StringIO())
    console.print(Text.from_ansi("\n".join(lines)))
    svg = console.export_svg(title="fleetrun --device cpu --nproc_per_node 2 examples/digits.py")
    svg = svg.replace('font-family: "Fira Code";', "").replace("Fira Code", "DejaVu Sans Mono")
    width, height = (float(size) for size in svg.partition('viewBox="0 0 ')[2].partition('"')[0].split())
    return svg, int(width), int(height)


def main(run: str, screen: str = "") -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "report.html").write_text(page.page([read(run)]))
        browser = Chromium(folder / "profile")
        try:
            for kind, (width, height, dark) in SHAPES.items():
                browser.open(folder / "report.html", width=width, height=height, dark=dark)
                browser.picture(OUT / f"report_{kind}.png")
            if screen:
                drawing, width, height = terminal(Path(screen).read_text())
                (folder / "screen.html").write_text(f"<!doctype html><body style='margin:0'>{drawing}</body>")
                browser.open(folder / "screen.html", width=width, height=height)
                browser.picture(OUT / "terminal.png")
        finally:
            browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
