"""A griffe extension for the API reference: a line `name: meaning` (or `name   meaning`) becomes an item of a list.

Our docstrings name arguments in this way, without a heading, because they are read in the source more often than here.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Function


class Arguments(Extension):
    def on_function(self, *, func: Function, **kwargs: Any) -> None:
        if func.docstring:
            name = "(?:" + "|".join(re.escape(p.name.lstrip("*")) for p in func.parameters) + ")"
            line = re.compile(rf"^({name}(?:, {name})*)(?:: |  +)(?=\S)", re.M)
            text = line.sub(r"- **\1**: ", func.docstring.value)
            func.docstring.value = _after_a_blank_line(text)


def _after_a_blank_line(text: str) -> str:
    """Markdown begins a list only after one."""
    lines = text.split("\n")
    out: list[str] = []
    for line in lines:
        if line.startswith("- **") and out and out[-1].strip() and not out[-1].startswith(("- **", " ")):
            out.append("")
        out.append(line)
    return "\n".join(out)
