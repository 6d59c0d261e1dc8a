"""Which combinations of strategies there are, and how each is declared."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from fleetx.errors import NOT_BUILT, StrategyError
from fleetx.strategy import DistributedStrategy
from fleetx.strategy.part import Part, claims, defaults_of, every

Switches = tuple[str, ...]


def switches() -> list[str]:
    """Every switch that acts by itself."""
    return [name for name, part in every().items() if claims(part) and not part.always]


def combinations(largest: int, among: Sequence[str] = ()) -> Iterator[Switches]:
    """The single strategies, pairs, triples ... of these switches; by default of all."""
    for size in range(largest + 1):
        yield from itertools.combinations(among or switches(), size)


def parts(chosen: Switches, *, lossless: bool = False) -> dict[str, Part]:
    """These strategies with settings at which verify's model shows what they do, as they act together."""
    alone = {}
    for switch in chosen:
        kind = every()[switch]
        alone[switch] = kind(**(dict(kind.example) | dict((kind.lossless or {}) if lossless else {})))
    return {switch: part.beside(alone.values()) for switch, part in alone.items()}


def declared(chosen: Switches, full: Switches = (), *, lossless: bool = False) -> dict[str, Any]:
    """The arguments of DistributedStrategy. full: a larger combination, whose settings to use."""
    acting = parts(full or chosen, lossless=lossless)
    out: dict[str, Any] = {}
    for switch in chosen:
        part, defaults = acting[switch], defaults_of(every()[switch])
        own = {key: getattr(part, key) for key in defaults if getattr(part, key) != defaults[key]}
        names = {field: name for name, field in part.flat.items()}
        out |= {switch: True} | {names[k]: v for k, v in own.items()} if names else {switch: own or True}
    return out


def refusals(strategy: dict[str, Any]) -> list[str]:
    """Why these strategies do not work together; empty if they do."""
    try:
        DistributedStrategy(**strategy).plan()
    except StrategyError as error:
        return error.problems
    return []


def kind_of(problems: Sequence[str]) -> str:
    """Are these strategies a contradiction, or only not built yet?"""
    return "unbuilt" if all(NOT_BUILT in problem for problem in problems) else "refused"
