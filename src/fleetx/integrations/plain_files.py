"""Files of settings as plain data: bounded in size and depth, and without duplicate names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fleetx.base import yaml_file
from fleetx.base.suggest import shown
from fleetx.errors import StrategyError

_LONGEST = 1 << 20  # bytes


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_text(path), object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise StrategyError(f"line {error.lineno}, column {error.colno}: is not JSON: {error.msg}") from None
    except RecursionError:
        raise StrategyError("nested too deeply for settings") from None
    if not isinstance(found, dict):
        raise StrategyError("must be an object of names and values")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise StrategyError(f"{shown(twice)} is given more than once: remove one of them")
    return found


def read_text(path: Path) -> str:
    return yaml_file.read_text(path, _LONGEST)
