"""parts -> Plan, or StrategyError. The order of declaration is irrelevant: the order of the acts is derived."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from fleetx.errors import StrategyError
from fleetx.strategy.part import Part
from fleetx.strategy.stage import Act, Fact, Stage


@dataclass(frozen=True)
class Plan:
    """The acts of all parts in the order in which they run, and what is true of the gradient when each is called."""

    parts: tuple[Part, ...]
    acts: tuple[Act, ...]
    facts: tuple[frozenset[Fact], ...]  # facts[i]: true when acts[i] is called

    def at(self, stage: Stage) -> tuple[Act, ...]:
        return tuple(a for a in self.acts if a.stage is stage)

    def facts_at(self, act: Act) -> frozenset[Fact]:
        return self.facts[self.acts.index(act)]


def compose(parts: Iterable[Part]) -> Plan:
    """Order the acts of all parts, or say everything that keeps them from working together."""
    parts = tuple(parts)
    acts = sorted((a for p in parts for a in p.acts()), key=lambda a: a.name)
    plan: list[Act] = []
    known: list[frozenset[Fact]] = []
    facts: frozenset[Fact] = frozenset()
    problems: list[str] = []
    for stage in Stage:
        here = [a for a in acts if a.stage is stage]
        if stage.solo and len(here) > 1:
            problems.append(f"{_and(a.name for a in here)} each want the {stage.name} stage for themselves: keep one")
        for act in _ordered(here, facts, problems):
            problems += _objections(act, facts, acts)
            plan.append(act)
            known.append(facts)
            facts = (facts | act.claim.makes) - act.claim.ends
    if problems:
        raise StrategyError(problems)
    return Plan(parts, tuple(plan), tuple(known))


def first(b: Act, a: Act, facts: Set[Fact]) -> bool:
    """Must b run before a, within one stage that is entered with `facts`?"""
    if a is b:
        return False
    ends_what_a_bars = b.claim.ends & a.claim.bars & facts
    needs_what_a_ends = b.claim.needs & a.claim.ends
    bars_what_a_makes = b.claim.bars & (a.claim.makes - facts)
    makes_what_a_needs = b.claim.makes & (a.claim.needs - facts)
    return bool(ends_what_a_bars or needs_what_a_ends or bars_what_a_makes or makes_what_a_needs)


def _ordered(here: list[Act], facts: Set[Fact], problems: list[str]) -> list[Act]:
    graph = {a: [b for b in here if first(b, a, facts)] for a in here}
    try:
        return list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        problems.append(f"{_and(a.name for a in error.args[1][1:])} each need the other to run first: keep one")
        return here


def _objections(act: Act, facts: Set[Fact], acts: list[Act]) -> Iterator[str]:
    for fact in sorted(act.claim.needs - facts, key=lambda f: f.name):
        yield f"{act.name} needs a gradient {fact.value}, and no part makes it so"
    for fact in sorted(act.claim.bars & facts, key=lambda f: f.name):
        makers = _and(a.name for a in acts if fact in a.claim.makes)
        yield f"{act.name} cannot take a gradient {fact.value}, which {makers} makes it: turn one of them off"


def _and(names: Iterable[str]) -> str:
    *rest, last = names
    return f"{', '.join(rest)} and {last}" if rest else last
