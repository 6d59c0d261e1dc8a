"""What `fleetx import` makes of the settings of another system."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fleetx.strategy import DistributedStrategy


@dataclass
class Imported:
    """A strategy, and everything that is not in it, each with a sentence."""

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
    """A mapping whose entries are taken one by one, so that what is left over can be named."""

    def __init__(self, values: Any, where: str = ""):
        self.values: dict[str, Any] = dict(values) if isinstance(values, dict) else {}
        self.where = where

    def take(self, key: str, default: Any = None) -> Any:
        return self.values.pop(key, default)

    def section(self, key: str) -> Taken:
        return Taken(self.values.pop(key, None), self.name(key) + ".")

    def name(self, key: str) -> str:
        return self.where + key

    def rest(self) -> list[str]:
        """The names that nobody took."""
        return [self.name(key) for key in self.values]
