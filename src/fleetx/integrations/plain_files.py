"""Files of settings as plain data: bounded in size and depth, and without duplicate names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    with open(path, "rb") as file:
        content = file.read(_LONGEST + 1)
    if len(content) > _LONGEST:
        raise StrategyError(f"is longer than {_LONGEST >> 10} KiB, so it is not a file of settings")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise StrategyError(f"byte {error.start + 1} is not UTF-8: save the file as UTF-8") from None
