"""DistributedStrategy: one switch per part, one dict of settings per switch.

Attribute style, keyword style and YAML describe the same object:

    strategy = DistributedStrategy()            DistributedStrategy(amp={"dtype": "bfloat16"})
    strategy.amp = True
    strategy.amp_configs = {"dtype": "bfloat16"}

Nothing is dropped: a name, a type or a value that cannot be honoured is an error where it is written.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fleetx.errors import StrategyError
from fleetx.strategy import ignored
from fleetx.strategy.compose import Plan, compose
from fleetx.strategy.part import Part, every, switch_of
from fleetx.strategy.settings import Settings

CONFIGS = "_configs"


class _on_the_class(classmethod):  # noqa: N801  used as a decorator
    """A classmethod that an instance refuses: `strategy.load(path)` would leave the strategy as it is."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is not None:
            name = self.__func__.__name__
            raise TypeError(f"{name} makes a new strategy: strategy = DistributedStrategy.{name}(path)")
        return super().__get__(instance, owner)


class DistributedStrategy:
    """What the user declares. See `docs/parts` for a card on every switch and its settings."""

    def __init__(self, **declared: Any):
        """Keyword style: `amp=True`, or `amp={...}` to turn it on with settings, or `amp=True, amp_configs={...}`."""
        names = {p: Settings(p) for p in every().values()}
        object.__setattr__(self, "_settings", {switch_of(p): s for p, s in names.items()})
        object.__setattr__(self, "_switches", {})  # only what was assigned: a switch set to False is an answer too
        object.__setattr__(self, "_idle", ignored.idle_defaults())
        problems: list[str] = []
        for name, value in declared.items():
            if isinstance(value, Mapping) and name + CONFIGS in declared:
                problems.append(f"{name}={{...}} and {name}{CONFIGS}={{...}} are both given: keep one")
            try:
                setattr(self, name, value)
            except StrategyError as error:
                problems += error.problems
        if problems:
            raise StrategyError(problems)

    # --- attributes ------------------------------------------------------------------------------
    def __setattr__(self, name: str, value: Any) -> None:
        kind, key, field = self._find(name)
        if kind == "switch":
            self._switch(key, value)
        elif kind == "settings":
            self._settings[key].replace(value)
        elif kind == "flat":
            self._settings[key][field] = value
        else:
            self._idle[name] = ignored.checked(name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            kind, key, field = self._find(name)
        except StrategyError as error:
            raise AttributeError(str(error)) from None
        if kind == "switch":
            return self._switches.get(key, every()[key].always)
        if kind == "settings":
            return self._settings[key]
        if kind == "flat":
            return self._settings[key][field]
        return self._idle[name]

    def _find(self, name: str) -> tuple[str, str, str]:
        """What an attribute is: (kind, switch of its part, field)."""
        for switch, part in every().items():
            if name == switch and not part.always:
                return "switch", switch, ""
            if name == switch + CONFIGS and not part.flat:
                return "settings", switch, ""
            if name in part.flat:
                return "flat", switch, part.flat[name]
        if name in self._idle:
            return "idle", "", ""
        if name in ignored.REFUSED:
            raise StrategyError(f"{name}: {ignored.REFUSED[name]}")
        raise StrategyError(f"DistributedStrategy has no {name!r}{_nearest(name, self._names())}")

    def _switch(self, switch: str, value: Any) -> None:
        if isinstance(value, Mapping) and not every()[switch].flat:
            self._settings[switch].replace(value)
            value = True
        if not isinstance(value, bool):
            settings = "" if every()[switch].flat else " or a dict of settings"
            raise StrategyError(f"{switch} = {value!r}: must be True or False{settings}")
        self._switches[switch] = value

    def _names(self) -> list[str]:
        names = list(self._idle)
        for switch, part in every().items():
            names += part.flat
            names += [] if part.always else [switch]
            names += [] if part.flat else [switch + CONFIGS]
        return sorted(names)

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *self._names()]

    # --- meaning ---------------------------------------------------------------------------------
    def plan(self) -> Plan:
        """The plan of everything that is on, or every problem of this strategy in one StrategyError."""
        parts: list[Part] = []
        problems: list[str] = []
        for switch, part in every().items():
            settings = self._settings[switch]
            if part.always or self._switches.get(switch):
                try:
                    made = settings.part()
                    parts += [] if part.is_meta else [made]  # those that it stands for are not known yet
                except StrategyError as error:
                    problems += error.problems
            elif settings.given and switch not in self._switches:
                where = switch + CONFIGS if not part.flat else ", ".join(part.flat)
                problems.append(f"{where} is set, but {switch} is not: add `strategy.{switch} = True` or remove it")
        try:
            plan = compose(parts)
        except StrategyError as error:
            problems += error.problems
        if problems:
            raise StrategyError(problems)
        return plan

    def without_meaning(self) -> Iterator[tuple[str, str]]:
        """Settings that were accepted for a Paddle script's sake and mean nothing here, each with the reason."""
        yield from ignored.assigned(self._idle)
        for switch, settings in self._settings.items():
            for key in sorted(settings.given & set(settings.kind.no_meaning)):
                yield f"{switch}{CONFIGS}[{key!r}]", settings.kind.no_meaning[key]

    # --- YAML, equality, printing ----------------------------------------------------------------
    def declared(self) -> dict[str, Any]:
        """What was declared, as plain data: the content of the YAML file."""
        out: dict[str, Any] = {}
        for switch, part in every().items():
            settings = self._settings[switch]
            if switch in self._switches:
                out[switch] = self._switches[switch]
            if part.flat:
                out |= {name: settings[field] for name, field in part.flat.items() if field in settings.given}
            elif settings.given:
                out[switch + CONFIGS] = {key: settings[key] for key in settings if key in settings.given}
        return out | ignored.plain(self._idle)

    def save(self, path: str | Path) -> None:
        """Write the strategy as YAML, so that `DistributedStrategy.load` gives an equal one."""
        from fleetx.base import yaml_file

        yaml_file.write(path, self.declared())

    @_on_the_class
    def load(cls: Any, path: str | Path) -> DistributedStrategy:  # noqa: N805
        """Read a strategy from YAML; every problem in the file is in one StrategyError."""
        from fleetx.base import yaml_file

        try:
            return cls(**yaml_file.read(path))
        except StrategyError as error:
            raise StrategyError([f"{path}: {p}" for p in error.problems]) from None

    def _values(self) -> dict[str, Any]:
        """Every attribute with its value, defaults included: what equality compares."""
        return {name: dict(v) if isinstance(v := getattr(self, name), Settings) else v for name in self._names()}

    def __eq__(self, other: object) -> bool:
        return self._values() == other._values() if isinstance(other, DistributedStrategy) else NotImplemented

    def __copy__(self) -> DistributedStrategy:
        return copy.deepcopy(self)  # a copy that shares its settings would be no copy

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"DistributedStrategy({', '.join(f'{k}={v!r}' for k, v in self.declared().items())})"

    def __str__(self) -> str:
        from fleetx.strategy.explain import strategy_table

        return strategy_table(self)


def _nearest(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f": did you mean {near[0]!r}?" if near else f". It has: {', '.join(names)}"
