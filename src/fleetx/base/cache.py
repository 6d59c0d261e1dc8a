"""JSON files in the user's cache folder: results that need not be measured again after a restart."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

from fleetx.base.files import write_atomic

log = logging.getLogger(__name__)


def folder(kind: str) -> Path | None:
    """The folder `kind` in FLEETX_CACHE or, if unset, in the user's cache; None if FLEETX_CACHE is empty: no cache."""
    root = os.environ.get("FLEETX_CACHE")
    if root == "":
        return None
    return (Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fleetx") / kind


def load(kind: str, name: str) -> Any:
    """The stored data, or None if it is missing or cannot be read."""
    where = folder(kind)
    try:
        return json.loads((where / f"{name}.json").read_text()) if where is not None else None
    except (OSError, ValueError):
        return None


def save(kind: str, name: str, data: Any) -> None:
    """Store the data. If the disk is full or read-only, the only cost is having to measure again."""
    where = folder(kind)
    if where is None:
        return
    try:
        where.mkdir(parents=True, exist_ok=True)
        write_atomic(where / f"{name}.json", json.dumps(data))
    except OSError as error:
        log.warning("%s/%s could not be stored: %s", kind, name, error)
