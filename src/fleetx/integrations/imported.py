"""The result of `fleetx import`.

The settings of another system are read as plain data: limited in size and depth, and without duplicate names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetx.base import yaml_file
from fleetx.base.suggest import shown
from fleetx.errors import StrategyError
from fleetx.strategy import DistributedStrategy

LONGEST = 1 << 20  # bytes of a file
_WORDS = {"true": True, "false": False, "yes": True, "no": False}


@dataclass
class Imported:
    """A strategy, and a sentence about each setting that it covers only in part or not at all."""

    system: str
    strategy: DistributedStrategy = field(default_factory=DistributedStrategy)
    differs: list[str] = field(default_factory=list)  # has an equivalent, but not in every respect
    script: list[str] = field(default_factory=list)  # belongs to the script or to the command that starts it
    missing: list[str] = field(default_factory=list)  # has no equivalent
    ignored: list[str] = field(default_factory=list)  # has no effect in the other system either

    def __str__(self) -> str:
        parts = {
            "not quite the same": self.differs,
            "write these into your script or command": self.script,
            "no equivalent": self.missing,
            f"{self.system} ignores these silently": self.ignored,
        }
        shown = [f"{title}:\n" + "".join(f"  - {line}\n" for line in lines) for title, lines in parts.items() if lines]
        return "\n".join(shown)


class Taken:
    """A mapping whose entries are taken one by one, so that those left over can be listed."""

    def __init__(self, values: dict[str, Any] | None, where: str = ""):
        self.values = dict(values or {})
        self.where = where

    def take(self, key: str, default: Any = None) -> Any:
        return self.values.pop(key, default)

    def flag(self, key: str) -> bool:
        """Take a boolean, which may also be a word in quotes. False if it is missing."""
        found = self.take(key)
        if isinstance(found, str):
            found = _WORDS.get(found.lower(), found)
        if not isinstance(found, bool | None):
            raise StrategyError(f"{self.name(key)} = {shown(found)}: must be true or false")
        return bool(found)

    def whole(self, key: str) -> int | None:
        found = self.take(key)
        if isinstance(found, str) and found.isdecimal():
            found = int(found)
        if found is not None and (type(found) is not int or found < 1):
            raise StrategyError(f"{self.name(key)} = {shown(found)}: must be a whole number of at least 1")
        return found

    def section(self, key: str) -> Taken:
        found = self.take(key)
        if not isinstance(found, dict | None):
            raise StrategyError(f"{self.name(key)} = {shown(found)}: must be a section of names and values")
        return Taken(found, self.name(key) + ".")

    def name(self, key: str) -> str:
        return self.where + key

    def rest(self) -> list[str]:
        """The names that were not taken."""
        return [self.name(key) for key in self.values]


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(yaml_file.read_text(path, LONGEST), object_pairs_hook=_unique)
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
