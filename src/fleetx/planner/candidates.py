"""All plans that there are: what the user set, and the offers of the parts that he left alone; those that compose."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fleetx.errors import StrategyError
from fleetx.planner.cost import terms_of
from fleetx.planner.model_profile import Work
from fleetx.planner.workload import by_budget
from fleetx.strategy import DistributedStrategy
from fleetx.strategy.compose import Plan, compose
from fleetx.strategy.cost_model import ALLOWED, Cluster, CostTerms, Offer
from fleetx.strategy.part import Part, every
from fleetx.strategy.stage import Fact


@dataclass(frozen=True, eq=False)
class Candidate:
    """A strategy, and how the batch is cut under it: global = feed x merged x replicas."""

    mine: Mapping[str, Any]  # what the user said
    chosen: Mapping[str, Mapping[str, Any]]  # and what not
    plan: Plan
    feed: int
    terms: CostTerms

    @property
    def strategy(self) -> DistributedStrategy:
        return DistributedStrategy(**self.mine, **_keywords(self.chosen))

    def keeps(self, params: Iterable[Tensor]) -> int:
        """Bytes that strategies keep."""
        params, made = list(params), frozenset().union(*(act.claim.makes for act in self.plan.acts))
        return sum(part.keeps(params, scaled=Fact.SCALED in made) for part in self.plan.parts)

    @property
    def budgeted(self) -> bool:
        return any(by_budget(part) for part in self.plan.parts)

    @property
    def title(self) -> str:
        words = [f"{switch}({_settings(values)})" for switch, values in self.chosen.items()]
        return " + ".join(words) or "as it is"

    @property
    def equation(self) -> str:
        feed, merged, replicas = self.feed, self.terms.merged, self.terms.replicas
        cut = f" (as {self.terms.micro} micro-batches)" if self.terms.micro > 1 else ""
        return f"{feed * merged * replicas} = {feed} samples at a time{cut} x {merged} merged x {replicas} replicas"


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())


def declared(strategy: DistributedStrategy) -> dict[str, Any]:
    """The user's own, without the switch that asks for others."""
    choosers = {switch for switch, part in every().items() if part.is_meta}
    return {key: value for key, value in strategy.declared().items() if key.removesuffix("_configs") not in choosers}


def offered(
    strategy: DistributedStrategy, cluster: Cluster, work: Work, *, allow: str, budgets: bool = True
) -> Iterator[Candidate]:
    """budgets: may recomputation be chosen, too?"""
    mine = declared(strategy)
    given = {key.removesuffix("_configs") for key in mine}
    free: dict[str, list[tuple[Offer, Part] | None]] = {}
    for switch, part in every().items():
        said = switch in given or any(name in given for name in part.flat)
        if said or part.always or (part.segments and not budgets):
            continue
        if offers := [offer for offer in part.offers(cluster) if offer.needs in ALLOWED[allow]]:
            free[switch] = [None, *((offer, part(**offer.settings)) for offer in offers)]
    base = DistributedStrategy(**mine).plan().parts
    for combination in itertools.product(*free.values()):
        taken = {switch: one for switch, one in zip(free, combination, strict=True) if one is not None}
        parts = [*base, *(part for _, part in taken.values())]
        terms = terms_of(parts, cluster, work)
        feed = cut(terms, work.samples)
        if feed is None or (terms.stages > 1 and work.stages(terms.stages) is None):
            continue
        try:
            plan = compose(parts)
        except StrategyError:
            continue
        yield Candidate(mine, {switch: offer.settings for switch, (offer, _) in taken.items()}, plan, feed, terms)


def cut(terms: CostTerms, samples: int) -> int | None:
    """How many samples a rank is given at a time; None: the batch cannot be cut so."""
    batch = terms.cluster.global_batch
    if batch is None:
        return samples
    if not terms.replicas:
        return None  # a pipeline longer than there are ranks
    feed, rest = divmod(batch, terms.merged * terms.replicas)
    return feed if feed and not rest and feed % terms.micro == 0 else None


def _keywords(chosen: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for switch, values in chosen.items():
        flat = {field: name for name, field in every()[switch].flat.items()}
        out |= {switch: True} | {flat[key]: value for key, value in values.items()} if flat else {switch: dict(values)}
    return out
