"""Derive the order in which parts act, or why they do not work together, from what they declare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from fleetx.errors import StrategyError
from fleetx.strategy import conflict
from fleetx.strategy.conflict import Conflict
from fleetx.strategy.part import Part
from fleetx.strategy.stage import Act, Fact, Stage


@dataclass(frozen=True)
class Plan:
    """The acts of all parts in the order they run, and the facts that hold when each is called."""

    parts: tuple[Part, ...]
    acts: tuple[Act, ...]
    facts: tuple[frozenset[Fact], ...]  # facts[i]: true when acts[i] is called

    def at(self, stage: Stage) -> tuple[Act, ...]:
        return tuple(a for a in self.acts if a.stage is stage)

    def makes(self, fact: Fact) -> bool:
        """Does any act make this fact true, even temporarily?"""
        return any(fact in act.claim.makes for act in self.acts)

    @property
    def between_replicas(self) -> list[str]:
        """Switches whose acts decide what replicas of the model exchange, how, or along which path."""
        acts = [a for a in self.acts if a.call is not None and a.stage in (Stage.REDUCE, Stage.WIRE)]
        return sorted({a.switch for a in acts} | {a.switch for a in self.acts if Fact.ROUTED in a.claim.makes})

    def facts_at(self, act: Act) -> frozenset[Fact]:
        return self.facts[self.acts.index(act)]


def compose(parts: Iterable[Part]) -> Plan:
    """Order the acts of all parts, or raise one StrategyError with every conflict between them."""
    plan, conflicts = _arranged(parts)
    if conflicts:
        # One sentence per group of switches: whatever resolves one conflict between them resolves the others.
        one_each: dict[frozenset[str], Conflict] = {}
        for each in conflicts:
            one_each.setdefault(each.switches, each)
        # What a switch lacks may only follow from its conflict with another.
        told = [c for c in one_each.values() if not any(c.switches < others for others in one_each)]
        raise StrategyError([each.sentence(_works) for each in told])
    return plan


def _works(parts: Iterable[Part]) -> bool:
    return not _arranged(parts)[1]


def _arranged(parts: Iterable[Part]) -> tuple[Plan, list[Conflict]]:
    given = tuple(parts)
    parts = tuple(part.adapted_to(given) for part in given)
    acts = sorted((a for p in parts for a in p.acts()), key=lambda a: a.name)
    plan: list[Act] = []
    known: list[frozenset[Fact]] = []
    facts: frozenset[Fact] = frozenset()
    conflicts: list[Conflict] = []
    for stage in Stage:
        here = [a for a in acts if a.stage is stage]
        rivals = [a for a in here if a.call is not None]  # what torch does does not compete with a part
        if stage.solo and len(rivals) > 1:
            conflicts += conflict.rivals(rivals, stage)
        for act in _ordered(here, facts, conflicts):
            conflicts += _objections(act, facts, acts)
            plan.append(act)
            known.append(facts)
            # If ranks exchange parameters, a WIRE act does not touch gradients, so it makes no fact about them true.
            makes = act.claim.makes if stage is not Stage.WIRE or Fact.LOCAL not in facts else frozenset[Fact]()
            facts = (facts | makes) - act.claim.ends
    return Plan(parts, tuple(plan), tuple(known)), conflicts


def first(b: Act, a: Act, facts: Set[Fact]) -> bool:
    """Must b run before a, in a stage that starts with these facts?"""
    return bool(why_first(b, a, facts))


def why_first(b: Act, a: Act, facts: Set[Fact]) -> dict[str, Set[Fact]]:
    """The facts because of which b must run before a, by what follows "a runs after b, ..."."""
    if a is b:
        return {}
    rules = {
        "because it does not work with": b.claim.ends & a.claim.bars & facts,
        "which must see": b.claim.needs & a.claim.ends,
        "which must not see": b.claim.bars & (a.claim.makes - facts),
        "because it needs": b.claim.makes & (a.claim.needs - facts),
    }
    return {rule: found for rule, found in rules.items() if found}


def _ordered(here: list[Act], facts: Set[Fact], conflicts: list[Conflict]) -> list[Act]:
    graph = {a: [b for b in here if first(b, a, facts)] for a in here}
    try:
        return list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        conflicts.append(conflict.circle(error.args[1][1:]))
        return here


def _objections(act: Act, facts: Set[Fact], acts: list[Act]) -> Iterator[Conflict]:
    yield from (conflict.missing(act, fact) for fact in Fact if fact in act.claim.needs - facts)
    for fact in (f for f in Fact if f in (act.claim.bars | act.claim.unbuilt) & facts):
        yield from (conflict.clash(act, maker, fact) for maker in acts if fact in maker.claim.makes)
