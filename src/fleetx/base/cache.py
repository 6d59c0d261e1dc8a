"""Choices that were made before, for the same model, shapes, budget and machine: a restart need not probe again."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
_VERSION = 1  # of what is stored


def folder(of: str = "recompute") -> Path | None:
    """FLEETX_CACHE, or the user's cache; None where FLEETX_CACHE is empty: then nothing is stored."""
    set_ = os.environ.get("FLEETX_CACHE")
    if set_ == "":
        return None
    root = Path(set_) if set_ else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fleetx"
    return root / of


def load(name: str) -> dict[str, Any] | None:
    where = folder()
    try:
        return json.loads((where / f"{name}.json").read_text()) if where is not None else None
    except (OSError, ValueError):
        return None


def save(name: str, choice: Any) -> None:
    """Beside, then renamed: several ranks may write the same. A disk that is full or closed costs time only."""
    where = folder()
    if where is None:
        return
    try:
        where.mkdir(parents=True, exist_ok=True)
        beside = where / f"{name}.{os.getpid()}"
        beside.write_text(json.dumps(dataclasses.asdict(choice)))
        beside.replace(where / f"{name}.json")
    except OSError as error:
        log.warning("the choice of what to recompute could not be stored: %s", error)
