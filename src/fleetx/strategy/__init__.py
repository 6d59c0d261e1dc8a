"""DistributedStrategy: one switch per part, one dict of settings per switch.

Attributes, keyword arguments and YAML describe the same object:

    strategy = DistributedStrategy()            DistributedStrategy(amp={"dtype": "bfloat16"})
    strategy.amp = True
    strategy.amp_configs = {"dtype": "bfloat16"}

Nothing is ignored silently: an unknown name, a wrong type or an unsupported value raises an error at the assignment.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fleetx.base.suggest import did_you_mean, shown
from fleetx.errors import StrategyError
from fleetx.strategy import ignored
from fleetx.strategy.compose import Plan, compose
from fleetx.strategy.part import Part, every
from fleetx.strategy.settings import Settings

CONFIGS = "_configs"


@cache
def _attributes() -> dict[str, tuple[str, str, str]]:
    """Map every attribute of a strategy to its kind, its part's switch, and the part's field."""
    found = dict.fromkeys(ignored.defaults(), ("ignored", "", ""))
    for switch, part in every().items():
        if not part.always:
            found[switch] = ("switch", switch, "")
        found |= {name: ("flat", switch, field) for name, field in part.flat.items()}
        if not part.flat:
            found[switch + CONFIGS] = ("settings", switch, "")
    return dict(sorted(found.items()))


class _class_only(classmethod):  # noqa: N801  used as a decorator
    """A classmethod that raises on an instance, because `strategy.load(path)` would not change `strategy`."""

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is not None:
            name = self.__func__.__name__
            raise TypeError(f"{name} returns a new strategy: write strategy = DistributedStrategy.{name}(path)")
        return super().__get__(instance, owner)


class DistributedStrategy:
    """The strategies to train with. `docs/parts` describes every switch and its settings."""

    def __init__(self, **declared: Any):
        """`amp=True`, `amp={...}` to turn it on with settings, or `amp=True, amp_configs={...}`."""
        object.__setattr__(self, "_settings", {switch: Settings(part) for switch, part in every().items()})
        object.__setattr__(self, "_switches", {})  # only those assigned: an explicit False differs from the default
        object.__setattr__(self, "_ignored", ignored.defaults())
        problems: list[str] = []
        for name, value in declared.items():
            if isinstance(value, Mapping) and name + CONFIGS in declared:
                problems.append(f"{name}={{...}} and {name}{CONFIGS}={{...}} are both given: use only one of them")
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
            self._ignored[name] = ignored.checked(name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            kind, key, field = self._find(name)
        except StrategyError as error:
            raise AttributeError(str(error)) from None
        if kind == "switch":
            return self._switches.get(key, False)
        if kind == "settings":
            return self._settings[key]
        if kind == "flat":
            return self._settings[key][field]
        return self._ignored[name]

    def _find(self, name: str) -> tuple[str, str, str]:
        if name in (attributes := _attributes()):
            return attributes[name]
        if name in ignored.UNSUPPORTED:
            raise StrategyError(f"{name}: {ignored.UNSUPPORTED[name]}")
        hint = did_you_mean(name, attributes, otherwise=f"possible names: {', '.join(attributes)}")
        raise StrategyError(f"DistributedStrategy has no {shown(name)}: {hint}")

    def _switch(self, switch: str, value: Any) -> None:
        if isinstance(value, Mapping) and not every()[switch].flat:
            self._settings[switch].replace(value)
            value = True
        if not isinstance(value, bool):
            settings = "" if every()[switch].flat else " or a dict of settings"
            raise StrategyError(f"{switch} = {shown(value)}: must be True or False{settings}")
        self._switches[switch] = value

    def __dir__(self) -> Iterable[str]:
        return [*super().__dir__(), *_attributes()]

    # --- the plan --------------------------------------------------------------------------------
    def plan(self) -> Plan:
        """The plan of all switches that are on. Raises one StrategyError that lists every problem."""
        parts: list[Part] = []
        problems: list[str] = []
        for switch, part in every().items():
            settings = self._settings[switch]
            if part.always or self._switches.get(switch):
                try:
                    made = settings.part()
                    parts += [] if part.is_meta else [made]  # a meta part has not chosen its parts yet
                except StrategyError as error:
                    problems += error.problems
            elif settings.given and switch not in self._switches:
                where = switch + CONFIGS if not part.flat else ", ".join(part.flat)
                remedy = f"add `strategy.{switch} = True`, or remove {where}"
                problems.append(f"{where} is set, but {switch} is off: {remedy}")
        try:
            plan = compose(parts)
        except StrategyError as error:
            problems += error.problems
        if problems:
            raise StrategyError(problems)
        return plan

    def without_meaning(self) -> Iterator[tuple[str, str]]:
        """Settings accepted because Paddle scripts set them, but without effect here, each with the reason."""
        yield from ignored.reasons(self._ignored)
        for switch, settings in self._settings.items():
            for key in sorted(settings.given & set(settings.kind.no_meaning)):
                yield f"{switch}{CONFIGS}[{key!r}]", settings.kind.no_meaning[key]
            for key, (unset, reason) in settings.kind.means_unset.items():
                if key in settings.given and settings[key] == unset:
                    yield f"{switch}{CONFIGS}[{key!r}]", reason

    # --- YAML, equality, printing ----------------------------------------------------------------
    def declared(self) -> dict[str, Any]:
        """What the user set, as plain data: the content of the YAML file."""
        out: dict[str, Any] = {}
        for switch, part in every().items():
            settings = self._settings[switch]
            if switch in self._switches:
                out[switch] = self._switches[switch]
            if part.flat:
                out |= {name: settings[field] for name, field in part.flat.items() if field in settings.given}
            elif settings.given:
                out[switch + CONFIGS] = {key: settings[key] for key in settings if key in settings.given}
        return out | ignored.plain(self._ignored)

    def save(self, path: str | Path) -> None:
        """Write the strategy as YAML; `DistributedStrategy.load` reads it back."""
        from fleetx.base import yaml_file

        yaml_file.write(path, self.declared())

    @_class_only
    def load(cls: Any, path: str | Path) -> DistributedStrategy:  # noqa: N805
        """Read a strategy from YAML, or raise one StrategyError with every problem in the file."""
        from fleetx.base import yaml_file

        try:
            return cls(**yaml_file.read(path))
        except StrategyError as error:
            raise StrategyError([f"{path}: {p}" for p in error.problems]) from None

    def _values(self) -> dict[str, Any]:
        """Every attribute, including defaults, for comparison."""
        return {name: dict(v) if isinstance(v := getattr(self, name), Settings) else v for name in _attributes()}

    def __eq__(self, other: object) -> bool:
        return self._values() == other._values() if isinstance(other, DistributedStrategy) else NotImplemented

    def __copy__(self) -> DistributedStrategy:
        return copy.deepcopy(self)  # a shallow copy would share its settings

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"DistributedStrategy({', '.join(f'{k}={v!r}' for k, v in self.declared().items())})"

    def __str__(self) -> str:
        from fleetx.strategy.explain import strategy_table

        return strategy_table(self)
