"""Derive the order in which parts act, or why they do not work together, from what they declare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from fleetx.errors import NOT_BUILT, StrategyError
from fleetx.strategy.part import Part
from fleetx.strategy.settings import changed
from fleetx.strategy.stage import Act, Fact, Stage, always

Conflict = tuple[list[Act], str]  # the conflicting acts, and a sentence that says why


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
            conflicts += _rivals(rivals, stage)
        for act in _ordered(here, facts, conflicts):
            conflicts += _objections(act, facts, acts)
            plan.append(act)
            known.append(facts)
            # If ranks exchange parameters, a WIRE act does not touch gradients, so it makes no fact about them true.
            makes = act.claim.makes if stage is not Stage.WIRE or Fact.LOCAL not in facts else frozenset[Fact]()
            facts = (facts | makes) - act.claim.ends
    if conflicts:
        # One sentence per group of switches: whatever resolves one conflict between them resolves the others.
        problems: dict[frozenset[str], str] = {}
        for among, sentence in conflicts:
            problems.setdefault(frozenset(a.switch for a in among), sentence + _instead(among))
        raise StrategyError(list(problems.values()))
    return Plan(parts, tuple(plan), tuple(known))


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
        cycle = error.args[1][1:]
        conflicts.append((cycle, f"{_names(cycle)} each need the other to run first: use only one of them"))
        return here


def _rivals(here: list[Act], stage: Stage) -> Iterator[Conflict]:
    """Why only one of these acts can run at this stage."""
    both = "both" if len(here) == 2 else "all"
    for decides in sorted({a.part.decides for a in here if a.part.decides}):
        same = [a for a in here if a.part.decides == decides]
        if len(same) > 1:
            yield same, f"{_names(same)} both decide {decides}, and only one can: use only one of them"
    if len({a.part.decides or a for a in here}) > 1:
        yield here, f"{_names(here)} {both} {stage.solo}, and {stage.because}: use only one of them"


def _objections(act: Act, facts: Set[Fact], acts: list[Act]) -> Iterator[Conflict]:
    for fact in (f for f in Fact if f in act.claim.needs - facts):
        switch = f"`{act.switch}`"
        yield [act], f"{switch} needs {fact.value}, which nothing in this strategy produces: turn {switch} off"
    for fact in (f for f in Fact if f in (act.claim.bars | act.claim.unbuilt) & facts):
        for maker in (a for a in acts if fact in a.claim.makes):
            change = " or change these settings" if _settings(act) or _settings(maker) else ""
            act_, maker_ = (f"`{a.switch}`{_settings(a)}" for a in (act, maker))
            if fact in act.claim.unbuilt:
                statement = f"{act_} combined with {maker_} {NOT_BUILT}, because `{maker.switch}` produces {fact.value}"
            else:
                why = f", because {act.claim.because}" if act.claim.because else ""
                statement = f"{act_} does not work with {fact.value}, which {maker_} produces{why}"
            yield [act, maker], f"{statement}: turn one of them off{change}"


def _instead(among: Iterable[Act]) -> str:
    """Alternatives to turning off one of the conflicting switches."""
    switches = {a.switch for a in among}
    found = [hint for a in among for switch, hint in a.part.instead.items() if switch in switches]
    return "".join(f", or {hint}" for hint in dict.fromkeys(found))


def _settings(act: Act) -> str:
    """The settings that the user changed, if the act depends on settings and not only on its switch."""
    given = changed(act.part) if act.claim.when is not always else ""
    return f" with {given}" if given else ""


def _names(acts: Iterable[Act]) -> str:
    *rest, last = (f"`{a.switch}`" for a in acts)
    return f"{', '.join(rest)} and {last}" if rest else last
