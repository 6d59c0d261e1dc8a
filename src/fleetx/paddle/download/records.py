"""Small json files in `.fleetx-download`, fleetx's own folder inside the local one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fleetx.base.files import write_atomic


def read(path: Path) -> dict[str, Any]:
    """Read a record; an empty one if there is none or it is damaged."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(record))
