"""python -m benchmarks.pictures: draw the pictures of the README from docs/results/*.json."""

from __future__ import annotations

import json

from benchmarks.frame.pages import RESULTS
from benchmarks.pictures.figures import PICTURES


def drawn() -> dict[str, str]:
    """The content of each file."""
    return {
        f"{name}.svg": draw(json.loads((RESULTS / f"{data}.json").read_text()))
        for name, (data, draw) in PICTURES.items()
    }


if __name__ == "__main__":
    for name, content in drawn().items():
        (RESULTS / name).write_text(content)
        print(f"wrote docs/results/{name}")
