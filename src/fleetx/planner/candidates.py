"""All plans: the user's declaration, plus every combination of the other parts' offers that composes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fleetx.errors import StrategyError
from fleetx.planner.cost import StepCost, step_cost, terms_of
from fleetx.planner.model_profile import ModelProfile
from fleetx.strategy import DistributedStrategy
from fleetx.strategy.compose import Plan, compose
from fleetx.strategy.cost_model import ALLOWED, Cluster, CostTerms, Offer
from fleetx.strategy.part import Part, every

if TYPE_CHECKING:
    from fleetx.planner.trial import Trial


@dataclass(eq=False)
class Candidate:
    """A plan, how it splits the batch (global batch = feed x merged x replicas), and what is known about it."""

    declared: Mapping[str, Any]  # by the user
    chosen: Mapping[str, Mapping[str, Any]]  # settings that were added, by switch
    plan: Plan
    feed: int
    terms: CostTerms
    cost: StepCost  # predicted
    exact: bool = True  # False: the cost of recomputation is a guess
    trial: Trial | None = None
    rejection: str = ""  # why it is not the winner

    @property
    def strategy(self) -> DistributedStrategy:
        batch = {"feed": self.feed, "merged": self.terms.merged, "replicas": self.terms.replicas}
        return DistributedStrategy(**self.declared, **_keywords(self.chosen), batch=batch)

    @property
    def total(self) -> int:
        """Samples per update."""
        return self.feed * self.terms.merged * self.terms.replicas

    @property
    def title(self) -> str:
        settings = {switch: ", ".join(f"{k}={v}" for k, v in values.items()) for switch, values in self.chosen.items()}
        return " + ".join(f"{switch}({values})" for switch, values in settings.items()) or "as declared"

    @property
    def equation(self) -> str:
        micro = f" (in {self.terms.micro_batches} micro-batches)" if self.terms.micro_batches > 1 else ""
        merged, replicas = self.terms.merged, self.terms.replicas
        return f"{self.total} = {self.feed} samples per step{micro} x {merged} merged x {replicas} replicas"


def kept_bytes(plan: Plan, params: Iterable[Tensor]) -> int:
    """What the strategies keep between steps."""
    params = list(params)
    return sum(part.keeps(params, plan) for part in plan.parts)


def budget_of(parts: Iterable[Part]) -> Any:
    """The memory budget for which recomputation chooses its segments; None without one."""
    budgets = (getattr(part, "memory_budget", None) for part in parts if part.segments)
    return next((budget for budget in budgets if budget is not None), None)


def declared(strategy: DistributedStrategy) -> dict[str, Any]:
    """What the user declared, without the parts that choose other parts, and without the batch that those choose."""
    skipped = {"batch", *(switch for switch, part in every().items() if part.is_meta)}
    return {key: value for key, value in strategy.declared().items() if key.removesuffix("_configs") not in skipped}


def _offers(strategy: DistributedStrategy, cluster: Cluster, allow: str) -> dict[str, list[tuple[Offer, Part]]]:
    """The offers of the parts that the user did not declare, by switch."""
    given = {key.removesuffix("_configs") for key in declared(strategy)}
    free = {s: p for s, p in every().items() if not p.always and given.isdisjoint((s, *p.flat))}
    return {
        switch: [(offer, part(**offer.settings)) for offer in part.offers(cluster) if offer.needs in ALLOWED[allow]]
        for switch, part in free.items()
    }


def forward_variants(
    strategy: DistributedStrategy, cluster: Cluster, base: Sequence[Part], allow: str
) -> list[Sequence[Part]]:
    """The user's parts plus each offered part that changes the forward."""
    offers = itertools.chain.from_iterable(_offers(strategy, cluster, allow).values())
    return [[*base, part] for _, part in offers if part.changes_forward]


def offered(
    strategy: DistributedStrategy, cluster: Cluster, profile: ModelProfile, params: Iterable[Tensor], *,
    allow: str, budgets: bool = True,
) -> Iterator[Candidate]:  # fmt: skip
    """Every candidate with its predicted cost. budgets: whether recomputation may be chosen."""
    params, mine = list(params), declared(strategy)
    offers = _offers(strategy, cluster, allow)
    free = {switch: some for switch, some in offers.items() if budgets or not every()[switch].segments}
    base = DistributedStrategy(**mine).plan().parts
    for combination in itertools.product(*([None, *some] for some in free.values())):
        taken = {switch: one for switch, one in zip(free, combination, strict=True) if one is not None}
        parts = [*base, *(part for _, part in taken.values())]
        terms = terms_of(parts, cluster, profile)
        feed = split(terms, profile.samples)
        if feed is None or (terms.stages > 1 and profile.stages(terms.stages) is None):
            continue
        try:
            plan = compose(parts)
        except StrategyError:
            continue
        if 1 < terms.shards == cluster.ranks and plan.between_replicas:
            continue
        chosen = {switch: offer.settings for switch, (offer, _) in taken.items()}
        kept = kept_bytes(plan, params) // terms.shards
        cost = step_cost(terms, profile, profile.forward_with(parts), feed, kept=kept)
        yield Candidate(mine, chosen, plan, feed, terms, cost)


def seconds_on(cluster: Cluster, candidate: Candidate, profile: ModelProfile) -> float:
    """The predicted seconds of an update on a cluster that differs only in its links."""
    parts = candidate.plan.parts
    terms, variant = terms_of(parts, cluster, profile), profile.forward_with(parts)
    return step_cost(terms, profile, variant, candidate.feed, peak=candidate.cost.peak).seconds


def split(terms: CostTerms, samples: int) -> int | None:
    """The samples per step of a rank, or None if the global batch cannot be split evenly."""
    batch = terms.cluster.global_batch
    if batch is None:
        return samples
    if not terms.replicas:
        return None  # the pipeline needs more ranks
    feed, rest = divmod(batch, terms.merged * terms.replicas)
    return feed if feed and not rest and feed % terms.micro_batches == 0 else None


def _keywords(chosen: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The chosen settings as keywords of DistributedStrategy."""
    out: dict[str, Any] = {}
    for switch, values in chosen.items():
        flat = {field: name for name, field in every()[switch].flat.items()}
        out |= {switch: True} | {flat[key]: value for key, value in values.items()} if flat else {switch: dict(values)}
    return out
