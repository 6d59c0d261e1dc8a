"""Which combinations of strategies there are, and how each is declared."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from fleetx.errors import StrategyError
from fleetx.strategy import DistributedStrategy
from fleetx.strategy.part import claims, every

Switches = tuple[str, ...]


def switches() -> list[str]:
    """Every switch that acts by itself."""
    return [name for name, part in every().items() if claims(part) and not part.always]


def combinations(largest: int, among: Sequence[str] = ()) -> Iterator[Switches]:
    """The single strategies, pairs, triples ... of these switches; by default of all."""
    for size in range(largest + 1):
        yield from itertools.combinations(among or switches(), size)


def settings(switch: str, *, lossless: bool = False) -> dict[str, Any]:
    """The settings at which verify's model shows what a strategy does."""
    part = every()[switch]
    return dict(part.example) | dict((part.lossless or {}) if lossless else {})


def declared(chosen: Switches, *, lossless: bool = False) -> dict[str, Any]:
    """The arguments of DistributedStrategy."""
    out: dict[str, Any] = {}
    for switch in chosen:
        own = settings(switch, lossless=lossless)
        names = {field: name for name, field in every()[switch].flat.items()}
        out |= {switch: True} | {names[k]: v for k, v in own.items()} if names else {switch: own or True}
    return out


def refusal(chosen: Switches) -> str:
    """Why these strategies do not work together; empty if they do."""
    try:
        DistributedStrategy(**declared(chosen)).plan()
    except StrategyError as error:
        return "; ".join(error.problems)
    return ""
