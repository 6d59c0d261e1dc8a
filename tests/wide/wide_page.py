"""Writes the table of docs/results/wide_worlds.md: `python tests/wide/wide_page.py`, on an idle machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

import torch

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs/results/wide_worlds.md"
BEGIN, END = "<!-- written by tests/wide/wide_page.py -->\n", "<!-- end -->\n"


def measured(ranks, folder):
    env = os.environ | {"PYTHONPATH": str(HERE), "FLEETX_WATCH": "0", "FLEETX_DEVICE": "cpu"}
    subprocess.run([sys.executable, str(HERE / "wide_child.py"), folder, str(ranks)], check=True, env=env)
    return json.loads((Path(folder) / str(ranks)).read_text())


def table():
    with tempfile.TemporaryDirectory() as folder:
        few, many = (measured(ranks, folder) for ranks in (512, 4096))
    heads = "strategy", "set-up, CPU seconds: 512", "4,096", "numbers received at set-up, 4,096", "groups of this rank"
    rows = [heads, ("---",) * len(heads)]
    for name, seen in many.items():
        received = f"{sum(seen['setup'].values()):,}"
        rows.append((name, f"{few[name]['seconds']:.2f}", f"{seen['seconds']:.2f}", received, str(seen["groups"])))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", f"Measured {date.today()} with torch {torch.__version__.partition('+')[0]}.", ""])


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
