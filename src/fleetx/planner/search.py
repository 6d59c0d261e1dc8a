"""Predict every candidate, try the best of them, and take the winner."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fleetx.base.sizes import format_bytes
from fleetx.comm.world import World
from fleetx.engine.checks import check
from fleetx.errors import StrategyError
from fleetx.measure.fake_step import bucket_bytes
from fleetx.parts.recompute import budget
from fleetx.planner.candidates import Candidate, declared
from fleetx.planner.cost import StepCost, account
from fleetx.planner.model_profile import Work
from fleetx.planner.trial import Trial, tried
from fleetx.planner.workload import Job, apart, by_budget, from_first, name
from fleetx.strategy import DistributedStrategy
from fleetx.strategy.cost_model import ALLOWED, Cluster
from fleetx.strategy.part import Part, every

log = logging.getLogger(__name__)
SMALLEST = 3  # plans of which it is found out exactly, where nothing else fits, whether they do
AGAIN = 0.6  # of the activations: what recomputing all blocks may free, as a first guess


@dataclass(eq=False)
class Considered:
    """A candidate, what is predicted of it, what was measured, and why it is not the one."""

    candidate: Candidate
    account: StepCost
    trial: Trial | None = None
    why: str = ""
    exact: bool = True  # False: what recomputation adds is a first guess

    @property
    def seconds(self) -> float:
        """As measured, else as predicted."""
        return self.trial.seconds if self.trial is not None and not self.trial.error else self.account.seconds


@dataclass
class Search:
    """One search: the plans that were considered, the best first."""

    job: Job
    cluster: Cluster
    work: Work
    world: World
    objective: str
    plans: list[Considered] = field(default_factory=list)
    considered: int = 0

    def predict(self, candidates: Sequence[Candidate]) -> None:
        """All of them, roughly where it takes long to know better; sorted."""
        found = [self._rough(candidate) for candidate in candidates]
        fitting = {self._bare(one.candidate) for one in found if self._fits(one) and not one.candidate.budgeted}
        # What fits without recomputation need not be recomputed, unless for the sake of memory.
        kept = [
            one for one in found
            if self.objective == "memory" or not one.candidate.budgeted or self._bare(one.candidate) not in fitting
        ]  # fmt: skip
        self.considered = len(candidates)
        self.plans = sorted(_undominated(kept), key=self._order)
        for one in self.plans:
            if not self._fits(one) and (one.exact or self.work.fixed > self.cluster.memory):
                one.why = f"takes {format_bytes(one.account.peak)}, and {format_bytes(self.cluster.memory)} are allowed"
            elif error := self.work.way(name(one.candidate.plan.parts)).error:
                one.why = f"does not run here: {error}"

    def sharpen(self, number: int) -> None:
        """Of the first ones know exactly what could only be guessed."""
        for _ in range(2 * number):
            best = [one for one in self.plans if not one.why][:number]
            rough = next((one for one in best if not one.exact), None)
            if rough is None:
                return
            self._exactly(rough)
            self.plans.sort(key=self._order)

    def try_out(self, number: int, until: float) -> None:
        """The first ones, as long as there is time."""
        good = 0
        while good < number:
            one = next((one for one in self._open() if one.trial is None and one.exact), None)
            if one is None:
                return
            left, needed = until - time.monotonic(), 3 * one.account.seconds * one.candidate.terms.every + 2
            # By the clock of rank 0: who alone measured a peak would wait for the others.
            enough, roomy = from_first(self.world, partial(_time_for, left, needed))
            if not enough:
                return
            peak = roomy and any(part.divides for part in one.candidate.plan.parts)
            one.trial = tried(self.job, one.candidate, self.world, seconds=max(30.0, 10 * needed), peak=peak)
            if one.trial.error:
                one.why = f"failed when tried: {one.trial.error}"
            elif one.trial.peak > self.cluster.memory:
                allowed = format_bytes(self.cluster.memory)
                one.why = f"took {format_bytes(one.trial.peak)} when tried, and {allowed} are allowed"
            else:
                good += 1
            self.sharpen(1)

    def winner(self) -> Considered:
        """Raises StrategyError where no plan fits."""
        good = self._open()
        good = [one for one in good if one.exact]
        if not good:  # perhaps the smallest of those that were only guessed
            rough = sorted((one for one in self._open() if not one.exact), key=lambda one: one.account.peak)
            for one in rough[:SMALLEST]:
                self._exactly(one)
            good = [one for one in self._open() if one.exact]
        if not good:
            raise StrategyError(self._impossible())
        measured = [one for one in good if one.trial is not None]
        if not measured and any(one.trial is not None for one in self.plans):
            raise StrategyError(self._impossible())  # what was tried failed: the next is no better known
        small = self.objective == "memory"
        best = min(measured or good[:1], key=lambda one: one.account.peak if small else one.seconds)
        for one in good:
            if one is not best:
                one.why = self._lost(one, best)
        self.plans.sort(key=lambda one: (one is not best, bool(one.trial is None), one.account.seconds))
        return best

    # --- in detail --------------------------------------------------------------------------------
    def _open(self) -> list[Considered]:
        return [one for one in self.plans if not one.why]

    def _fits(self, one: Considered) -> bool:
        return one.account.peak <= self.cluster.memory

    def _order(self, one: Considered) -> tuple[bool, float, float]:
        seconds, peak = one.account.seconds, one.account.peak
        first, second = (peak, seconds) if self.objective == "memory" else (seconds, peak)
        return bool(one.why), first, second

    def _bare(self, candidate: Candidate) -> tuple[str, ...]:
        """A candidate but for its recomputation."""
        return tuple(sorted(repr(part) for part in candidate.plan.parts if not part.segments))

    def _rough(self, candidate: Candidate) -> Considered:
        way = self.work.way(name(candidate.plan.parts))
        kept = candidate.keeps(self.job.model.parameters())
        plain = account(candidate.terms, self.work, way, candidate.feed, kept=kept)
        if not candidate.budgeted:
            return Considered(candidate, plain)
        activations = max(plain.peak - self.work.fixed, 1)
        least = plain.peak - AGAIN * activations  # perhaps more: whether it can be met is found out exactly
        least_asked = any(getattr(part, "memory_budget", None) == "min" for part in candidate.plan.parts)
        wanted = least if least_asked else max(self.cluster.memory, least)
        share = min(max(plain.peak - wanted, 0) / (AGAIN * activations), 1.0)
        again = share * way.forward.at(candidate.feed)
        made = account(candidate.terms, self.work, way, candidate.feed, again=again, peak=int(min(wanted, plain.peak)))
        return Considered(candidate, made, exact=False)

    def _exactly(self, one: Considered) -> None:
        found = from_first(self.world, lambda: apart(lambda: self._planned(one.candidate), self.world.device))
        one.exact = True
        if "error" in found:
            one.why = found["error"]
            one.account = replace(one.account, peak=found["least"])
            return
        if found["peak"] > self.cluster.memory:
            one.why = f"takes {format_bytes(found['peak'])}, and {format_bytes(self.cluster.memory)} are allowed"
        way = self.work.way(name(one.candidate.plan.parts))
        one.account = account(
            one.candidate.terms, self.work, way, one.candidate.feed, again=found["added"], peak=found["peak"]
        )

    def _planned(self, candidate: Candidate) -> dict[str, float | int | str]:
        """What the budget will choose when it trains. What it adds is scaled to the speed of all ranks at once."""
        part = next(part for part in candidate.plan.parts if by_budget(part))
        kept = candidate.terms.merged > 1 or self.cluster.ranks > 1
        apart = bucket_bytes(self.job.model) if candidate.terms.merged > 1 and self.cluster.ranks > 1 else 0
        keeps = candidate.keeps(self.job.model.parameters()) + apart
        step = self.job.step(candidate.feed, candidate.plan.parts, kept=kept, beside=keeps)
        try:
            choice = budget.choose(step, part.memory_budget)  # type: ignore[attr-defined]
        except StrategyError as error:
            return {"error": str(error), "least": budget.choose(step, "min", timed=False).peak}
        way = self.work.way(name(candidate.plan.parts))
        whole = way.forward.at(candidate.feed) + way.backward.at(candidate.feed)
        return {"added": whole * choice.added / choice.seconds if choice.seconds else 0.0, "peak": choice.peak}

    def _lost(self, one: Considered, best: Considered) -> str:
        if self.objective == "memory":
            return f"takes {format_bytes(one.account.peak)} against {format_bytes(best.account.peak)}"
        measured = one.trial is not None and best.trial is not None
        mine, its = (one.seconds, best.seconds) if measured else (one.account.seconds, best.account.seconds)
        verb = "took" if measured else "would take"
        if not measured and mine <= its:
            return "predicted to be as fast, and was not tried"
        return f"{verb} {mine / its:.2f} times as long"

    def _impossible(self) -> str:
        least = min(self.plans, key=lambda one: one.account.peak, default=None)
        if least is None:
            batch, ranks = self.cluster.global_batch, self.cluster.ranks
            cut = f", or that cuts a global batch of {batch} evenly for {ranks} ranks" if batch else ""
            return f"auto found no plan that this model, optimizer and strategy allow{cut}"
        failed = [one for one in self.plans if one.trial is not None and one.trial.error]
        if failed or self._fits(least):
            first = (failed or [least])[0]
            return f"auto: no plan could be run. The first was {first.candidate.title}: {first.why}"
        return (
            f"auto: no plan fits into {format_bytes(self.cluster.memory)}. The least is "
            f"{format_bytes(least.account.peak)}, by {least.candidate.title} with {least.candidate.feed} samples "
            "at a time. A smaller batch for each rank "
            "(auto_configs['global_batch'] lets it be cut), more ranks to divide the model between, or an optimizer "
            "that gathers less would help"
        )


def _time_for(left: float, needed: float) -> tuple[bool, bool]:
    """For a trial; and for another update in it, under the profiler."""
    return left > needed, needed < left / 2


def _undominated(plans: Sequence[Considered]) -> list[Considered]:
    """Without those of which a part could be left out, and it would be as fast and take no more memory."""

    def key(chosen: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(sorted(f"{switch} {settings}" for switch, settings in chosen.items()))

    known = {key(one.candidate.chosen): one for one in plans}

    def idle(one: Considered, switch: str) -> bool:
        rest = {s: settings for s, settings in one.candidate.chosen.items() if s != switch}
        other = known.get(key(rest))
        return (
            other is not None
            and other.account.seconds <= one.account.seconds
            and (other.account.peak <= one.account.peak)
        )

    return [one for one in plans if not any(idle(one, switch) for switch in one.candidate.chosen)]


def allowed(candidates: Iterator[Candidate], job: Job, world: World) -> Iterator[Candidate]:
    """Those that the model and the optimizer allow too. Ranks ask together: a part may have to ask the others."""
    known: dict[tuple[str, ...], bool] = {}
    for candidate in candidates:
        key = tuple(map(repr, candidate.plan.parts))
        if key not in known:
            try:
                check(candidate.plan, job.model, job.optimizer, world)
                known[key] = True
            except StrategyError as error:
                log.info("auto: %s cannot be: %s", candidate.title, error)
                known[key] = False
        if known[key]:
            yield candidate


def ways(strategy: DistributedStrategy, cluster: Cluster, base: Sequence[Part], allow: str) -> list[Sequence[Part]]:
    """The different ways to run a forward, besides the user's own."""
    given = {key.removesuffix("_configs") for key in declared(strategy)}
    kinds = [part for switch, part in every().items() if part.changes_forward and switch not in given]
    return [
        [*base, kind(**offer.settings)]
        for kind in kinds for offer in kind.offers(cluster) if offer.needs in ALLOWED[allow]
    ]  # fmt: skip
