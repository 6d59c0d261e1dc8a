"""The `*_configs` of a strategy: a dict with known keys that checks every value when it is assigned."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from pydantic import ValidationError

from fleetx.base.suggest import did_you_mean, either, shown
from fleetx.errors import StrategyError
from fleetx.strategy.part import Part, defaults_of, switch_of


class Settings(MutableMapping[str, Any]):
    """The settings of one part. Reading includes defaults; deleting a key restores its default.

    Values are live: a list can be edited in place, and is checked again when the plan is made.
    """

    def __init__(self, kind: type[Part]):
        self.kind = kind
        self._defaults = defaults_of(kind)
        self._values = copy.deepcopy(self._defaults)
        self._assigned: set[str] = set()

    @property
    def given(self) -> set[str]:
        """The keys that the user set, by assignment or by editing a list in place."""
        return self._assigned | {k for k, v in self._values.items() if v != self._defaults[k]}

    def replace(self, values: Any) -> None:
        """Assign the whole dict: missing keys return to their defaults."""
        if not isinstance(values, Mapping):
            raise StrategyError(f"{self._where()} = {shown(values)}: must be a dict; possible keys: {self._keys()}")
        part = self._check(dict(values))
        self._values = {key: _plain(getattr(part, key)) for key in self._defaults}
        self._assigned = set(values)

    def part(self) -> Part:
        """Build the part that these settings describe, or raise every problem in them."""
        part = self._check(self._values)
        prefix = "" if self.kind.flat else f"{self._where()}: "
        if problems := [prefix + p for p in part.problems()]:
            raise StrategyError(problems)
        return part

    # --- the dict ---------------------------------------------------------------------------------
    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._values[key] = _plain(getattr(self._check({key: value}), key))
        self._assigned.add(key)

    def __delitem__(self, key: str) -> None:
        self._values[key] = copy.deepcopy(self._defaults[key])
        self._assigned.discard(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(self._values)

    # --- checks -----------------------------------------------------------------------------------
    def _check(self, values: dict[Any, Any]) -> Part:
        """Build the part from these values and defaults, or raise every problem in one error."""
        known = {k: v for k, v in values.items() if k in self._defaults}
        problems = [self._unknown(k) for k in values if k not in known]
        try:
            part = self.kind(**known)
        except ValidationError as error:
            problems += self._wrong(error)
        if problems:
            raise StrategyError(problems)
        return part

    def _unknown(self, key: Any) -> str:
        hint = did_you_mean(key, self._defaults, otherwise=f"possible keys: {self._keys()}")
        return f"{self._where()} has no {shown(key)}: {hint}"

    def _wrong(self, error: ValidationError) -> Iterator[str]:
        reasons: dict[tuple[str, str], list[str]] = {}  # several if a setting accepts several types
        for e in error.errors():
            key = str(e["loc"][0])
            place = self._where(key) + "".join(f"[{i}]" for i in e["loc"][1:] if isinstance(i, int))
            reasons.setdefault((key, f"{place} = {shown(e['input'])}"), []).append(_plain_english(e["msg"]))
        for (key, assignment), texts in reasons.items():
            said = self.kind.__pydantic_fields__[key].description or either(dict.fromkeys(texts))  # type: ignore[attr-defined]
            yield f"{assignment}: must be {said} (default {self._defaults[key]!r})"

    def _where(self, key: str = "") -> str:
        return place_of(self.kind, key)

    def _keys(self) -> str:
        return ", ".join(self._defaults)


def place_of(kind: type[Part], key: str = "") -> str:
    """Where the user sets the part's setting, or all of them: `clip_configs['clip_norm']`, `clip_configs`."""
    for name, field in kind.flat.items():
        if field == key:
            return name
    configs = f"{switch_of(kind)}_configs"
    return f"{configs}[{key!r}]" if key else configs


def changed(part: Part) -> str:
    """The settings of a part that differ from their defaults, such as `k_steps=4, avg=False`."""
    defaults = defaults_of(type(part))
    return ", ".join(assigned(part, [key for key in defaults if getattr(part, key) != defaults[key]]))


def assigned(part: Part, keys: Iterable[str]) -> list[str]:
    """These settings of a part as the user writes them, such as `k_steps=4`."""
    names = {field: name for name, field in part.flat.items()}
    return [f"{names.get(key, key)}={getattr(part, key)!r}" for key in keys]


def _plain_english(message: str) -> str:
    for pydantic, plain in _PLAIN_ENGLISH.items():
        message = message.replace(pydantic, plain)
    return message


_PLAIN_ENGLISH = {
    "Input should be ": "",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "a valid boolean": "True or False",
    "a valid integer": "an integer",
    "a valid ": "a ",
}


def _plain(value: Any) -> Any:
    """The value as YAML can write it: NumPy's float64 is a float to Python, but not to YAML."""
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return float(value) if isinstance(value, float) else copy.deepcopy(value)
