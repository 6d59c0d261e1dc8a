"""The `*_configs` of a strategy: a dict that knows its keys, and checks every value where it is written."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from pydantic import ValidationError

from fleetx.errors import StrategyError
from fleetx.strategy.part import Part, defaults_of, switch_of


class Settings(MutableMapping[str, Any]):
    """The settings of one part. Reading gives defaults too; deleting a key brings its default back.

    The values are live: a list that was read can be edited in place, and is checked again when the plan is made.
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
        """Assign the whole dict: keys that are not in it go back to their defaults."""
        if not isinstance(values, Mapping):
            raise StrategyError(f"{self._where()} = {values!r}: must be a dict with keys of {self._keys()}")
        part = self._check(dict(values))
        self._values = {key: _plain(getattr(part, key)) for key in self._defaults}
        self._assigned = set(values)

    def part(self) -> Part:
        """The frozen part that these settings describe, or every problem in them."""
        part = self._check(self._values)
        problems = list(part.problems())
        if problems:
            raise StrategyError([f"{self._where()}: {p}" for p in problems])
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
        """Build the part from these values over the defaults, or raise every problem in one error."""
        unknown = [k for k in values if k not in self._defaults]
        problems = [self._unknown(k) for k in unknown]
        known = {k: v for k, v in values.items() if k not in unknown}
        try:
            part = self.kind(**known)
        except ValidationError as error:
            problems += [self._wrong(known, e["loc"], e["msg"]) for e in error.errors()]
        if problems:
            raise StrategyError(problems)
        return part

    def _unknown(self, key: Any) -> str:
        near = difflib.get_close_matches(str(key), list(self._defaults), n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}?" if near else f"its keys are {self._keys()}"
        return f"{self._where()} has no {key!r}: {hint}"

    def _wrong(self, values: dict[str, Any], loc: tuple[int | str, ...], message: str) -> str:
        key = str(loc[0])
        item = "".join(f"[{i}]" for i in loc[1:])
        message = message.replace("Input should", "must").replace("Value error, ", "")
        return f"{self._where(key)}{item} = {values[key]!r}: {message} (default {self._defaults[key]!r})"

    def _where(self, key: str = "") -> str:
        """How the user writes this setting."""
        for name, field in self.kind.flat.items():
            if field == key:
                return name
        configs = f"{switch_of(self.kind)}_configs"
        return f"{configs}[{key!r}]" if key else configs

    def _keys(self) -> str:
        return ", ".join(self._defaults)


def _plain(value: Any) -> Any:
    """The value as YAML knows it: numpy's float64 passes for a float, and cannot be written."""
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return float(value) if isinstance(value, float) else copy.deepcopy(value)
