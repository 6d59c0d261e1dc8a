"""The code blocks of a Markdown page, and what the tests of pages know of them.

A block that no test runs says why, in a comment above it that readers do not see: <!-- not run: needs two machines -->
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMMANDS = ("export", "fleetrun", "fleetx", "make", "mpirun", "pip", "python", "srun")
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    kind: str  # the language of a fence, "shell", or "" for anything else
    text: str
    not_run: str  # why
    error: str  # what the page shows to be raised

    @property
    def file(self) -> str:
        """The file that a reader is to save it as, which is its first line."""
        found = re.match(r"# (\w+\.py)\n", self.text)
        return found[1] if found else ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> list[Block]:
    lines = (ROOT / page).read_text().splitlines()
    found: list[Block] = []
    i = 0
    while i < len(lines):
        fence = re.match(r"```(\w*)$", lines[i])
        begin = i
        if fence:
            i = lines.index("```", i + 1)
            kind, text = fence[1], lines[begin + 1 : i]
        elif lines[i].startswith("    ") and not lines[i - 1].strip() and _in_text(lines, i):
            while i + 1 < len(lines) and (lines[i + 1].startswith("    ") or not lines[i + 1].strip()):
                i += 1
            kind, text = "", [line[4:] for line in lines[begin : i + 1]]
        else:
            i += 1
            continue
        if kind == "bash" or (not fence and text[0].split()[0] in COMMANDS):
            kind = "shell"
        reason = NOT_RUN.match(_before(lines, begin))
        found.append(
            Block(page, begin + 1, kind, "\n".join(text) + "\n", reason[1] if reason else "", _error(lines, i + 1))
        )
        i += 1
    return found


def _before(lines: list[str], i: int) -> str:
    return next((line for line in reversed(lines[:i]) if line.strip()), "")


def _in_text(lines: list[str], i: int) -> bool:
    """Is this code, and not the second paragraph of an item of a list?"""
    before = [line for line in lines[:i] if line.strip() and not line.startswith(" ")]
    return not before or not re.match(r"([-*]|\d+\.) ", before[-1])


def _error(lines: list[str], i: int) -> str:
    found = re.match(r"\n*```\n(\w+Error: .*?)\n```", "\n".join(lines[i:]), re.S)
    return found[1] if found else ""
