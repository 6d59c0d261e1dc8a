"""Predict every candidate, try the best few, and choose the winner."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from fleetx.base.sizes import format_bytes
from fleetx.comm.world import World
from fleetx.engine.checks import check
from fleetx.errors import StrategyError
from fleetx.measure.fake_step import bucket_bytes
from fleetx.parts.recompute import budget
from fleetx.planner.candidates import Candidate, budget_of, kept_bytes
from fleetx.planner.children import count_on_rank_0, on_rank_0
from fleetx.planner.cost import StepCost, step_cost
from fleetx.planner.model_profile import ModelProfile
from fleetx.planner.trial import try_out
from fleetx.planner.workload import Workload
from fleetx.strategy.cost_model import Cluster

log = logging.getLogger(__name__)
LAST_RESORT = 3  # guessed plans that are counted exactly if nothing else fits
RECOMPUTABLE = 0.6  # the guessed share of activations that recomputing all blocks frees


@dataclass
class Search:
    """One search; `candidates` has the best ones first."""

    workload: Workload
    cluster: Cluster
    profile: ModelProfile
    world: World
    objective: str
    candidates: list[Candidate] = field(default_factory=list)
    predicted: int = 0

    def predict(self, candidates: Sequence[Candidate]) -> None:
        """Sort the candidates by their predicted cost, and reject those that do not fit or run."""
        for candidate in candidates:
            if budget_of(candidate.plan.parts) is not None:
                self._guess_recompute(candidate)
        self.predicted = len(candidates)
        self.candidates = sorted(_undominated(list(self._needed(candidates))), key=self._order)
        for candidate in self.candidates:
            if not self._fits(candidate) and (candidate.exact or self.profile.fixed > self.cluster.memory):
                candidate.rejection = self._too_large("needs", candidate.cost.peak)
            elif error := self.profile.forward_with(candidate.plan.parts).error:
                candidate.rejection = f"does not run here: {error}"

    def refine(self, number: int) -> None:
        """Replace guesses among the first `number` candidates with exact costs."""
        for _ in range(2 * number):
            guessed = next((candidate for candidate in self._open()[:number] if not candidate.exact), None)
            if guessed is None:
                return
            self._plan_recompute(guessed)
            self.candidates.sort(key=self._order)

    def try_out(self, number: int, deadline: float) -> None:
        """Run the first `number` candidates that work, until the deadline."""
        succeeded = 0
        while succeeded < number:
            candidate = next((c for c in self._open() if c.trial is None and c.exact), None)
            if candidate is None:
                return
            needed = 3 * candidate.cost.seconds * candidate.terms.reduce_every + 2
            # Only rank 0 reads the clock: a rank that decided alone to measure a peak would wait for the others.
            left = on_rank_0(self.world, lambda: deadline - time.monotonic())
            if left <= needed:
                return
            peak = left > 2 * needed and any(part.divides for part in candidate.plan.parts)
            trial = try_out(self.workload, candidate, self.world, seconds=max(30.0, 10 * needed), peak=peak)
            candidate.trial = trial
            if trial.error:
                candidate.rejection = f"failed in the trial: {trial.error}"
            elif trial.peak > self.cluster.memory:
                candidate.rejection = self._too_large("needed", trial.peak)
            else:
                succeeded += 1
            self.refine(1)

    def winner(self) -> Candidate:
        """The best candidate. Raises StrategyError if none fits."""
        fitting = [candidate for candidate in self._open() if candidate.exact]
        if not fitting:
            for guessed in sorted(self._open(), key=lambda c: c.cost.peak)[:LAST_RESORT]:
                self._plan_recompute(guessed)
            fitting = [candidate for candidate in self._open() if candidate.exact]
        tried = [candidate for candidate in fitting if candidate.trial is not None]
        all_failed = not tried and any(candidate.trial is not None for candidate in self.candidates)
        if not fitting or all_failed:  # if every trial failed, an untried plan is no safer
            raise StrategyError(self._no_plan())
        small = self.objective == "memory"
        best = min(tried or fitting[:1], key=lambda c: c.cost.peak if small else _seconds(c))
        for candidate in fitting:
            if candidate is not best:
                candidate.rejection = self._comparison(candidate, best)
        self.candidates.sort(key=lambda c: (c is not best, c.trial is None, c.cost.seconds))
        return best

    # --- details ----------------------------------------------------------------------------------
    def _open(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if not candidate.rejection]

    def _fits(self, candidate: Candidate) -> bool:
        return candidate.cost.peak <= self.cluster.memory

    def _too_large(self, verb: str, peak: int) -> str:
        return f"{verb} {format_bytes(peak)} of {format_bytes(self.cluster.memory)}"

    def _order(self, candidate: Candidate) -> tuple[bool, float, float]:
        seconds, peak = candidate.cost.seconds, candidate.cost.peak
        first, second = (peak, seconds) if self.objective == "memory" else (seconds, peak)
        return bool(candidate.rejection), first, second

    def _needed(self, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
        """Leave out recomputation where the same plan fits without it, unless the objective is memory."""

        def others(candidate: Candidate) -> tuple[str, ...]:
            return tuple(sorted(repr(part) for part in candidate.plan.parts if not part.segments))

        fitting = {others(candidate) for candidate in candidates if candidate.exact and self._fits(candidate)}
        for candidate in candidates:
            if self.objective == "memory" or candidate.exact or others(candidate) not in fitting:
                yield candidate

    def _guess_recompute(self, candidate: Candidate) -> None:
        """Guess the cost. Finding out whether and how a budget can be met is slow: `refine` does it for the best."""
        peak = candidate.cost.peak
        freed = RECOMPUTABLE * max(peak - self.profile.fixed, 1)
        least = peak - freed
        target = least if budget_of(candidate.plan.parts) == "min" else max(self.cluster.memory, least)
        share = min(max(peak - target, 0) / freed, 1.0)
        forward = self.profile.forward_with(candidate.plan.parts).forward.at(candidate.feed)
        candidate.cost = self._cost(candidate, share * forward, int(min(target, peak)))
        candidate.exact = False

    def _cost(self, candidate: Candidate, recompute: float, peak: int) -> StepCost:
        variant = self.profile.forward_with(candidate.plan.parts)
        return step_cost(candidate.terms, self.profile, variant, candidate.feed, recompute=recompute, peak=peak)

    def _plan_recompute(self, candidate: Candidate) -> None:
        plan = count_on_rank_0(self.world, lambda: self._choose_segments(candidate))
        candidate.exact = True
        if "error" in plan:
            candidate.rejection = plan["error"]
            candidate.cost = replace(candidate.cost, peak=plan["least"])
            return
        if plan["peak"] > self.cluster.memory:
            candidate.rejection = self._too_large("needs", plan["peak"])
        candidate.cost = self._cost(candidate, plan["added"], plan["peak"])

    def _choose_segments(self, candidate: Candidate) -> dict[str, float | int | str]:
        """What the budget will choose in training. Scales the added seconds to the speed with all ranks running."""
        parts, params = candidate.plan.parts, self.workload.model.parameters()
        merged, several = candidate.terms.merged > 1, self.cluster.ranks > 1
        kept = kept_bytes(candidate.plan, params) + (bucket_bytes(self.workload.model) if merged and several else 0)
        step = self.workload.step(candidate.feed, parts, kept_gradients=merged or several, kept_bytes=kept)
        try:
            choice = budget.choose(step, budget_of(parts))
        except StrategyError as error:
            return {"error": str(error), "least": budget.choose(step, "min", timed=False).peak}
        variant = self.profile.forward_with(parts)
        seconds = variant.forward.at(candidate.feed) + variant.backward.at(candidate.feed)
        return {"added": seconds * choice.added / choice.seconds if choice.seconds else 0.0, "peak": choice.peak}

    def _comparison(self, candidate: Candidate, best: Candidate) -> str:
        if self.objective == "memory":
            return f"needs {format_bytes(candidate.cost.peak)}, not {format_bytes(best.cost.peak)}"
        if candidate.trial is not None and best.trial is not None:
            return f"took {_seconds(candidate) / _seconds(best):.2f} times as long"
        if candidate.cost.seconds <= best.cost.seconds:
            return "predicted to be as fast, but not tried"
        return f"would take {candidate.cost.seconds / best.cost.seconds:.2f} times as long"

    def _no_plan(self) -> str:
        least = min(self.candidates, key=lambda candidate: candidate.cost.peak, default=None)
        if least is None:
            batch, ranks = self.cluster.global_batch, self.cluster.ranks
            split = f", or none splits a global batch of {batch} evenly between {ranks} ranks" if batch else ""
            return f"auto: no plan is compatible with this model, optimizer and strategy{split}"
        failed = [c for c in self.candidates if c.trial is not None and c.trial.error]
        if failed or self._fits(least):
            first = (failed or [least])[0]
            return f"auto: no plan runs. The first one, {first.title}, {first.rejection}"
        return (
            f"auto: no plan fits into {format_bytes(self.cluster.memory)}. The smallest one, {least.title} with "
            f"{least.feed} samples per step, needs {format_bytes(least.cost.peak)}. Use a smaller batch per rank (set "
            "auto_configs['global_batch'] so that it can be split), more ranks, or an optimizer with less state"
        )


def _seconds(candidate: Candidate) -> float:
    """Measured if possible, else predicted."""
    trial = candidate.trial
    return trial.seconds if trial is not None and not trial.error else candidate.cost.seconds


def _undominated(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Drop candidates that are no better in time or memory than the same plan without one of its parts."""

    def key(candidate: Candidate, without: str = "") -> tuple[str, ...]:
        return tuple(sorted(f"{switch} {values}" for switch, values in candidate.chosen.items() if switch != without))

    known = {key(candidate): candidate.cost for candidate in candidates}

    def idle(candidate: Candidate, switch: str) -> bool:
        other, cost = known.get(key(candidate, switch)), candidate.cost
        return other is not None and other.seconds <= cost.seconds and other.peak <= cost.peak

    return [c for c in candidates if not any(idle(c, switch) for switch in c.chosen)]


def compatible(candidates: Iterable[Candidate], workload: Workload, world: World) -> Iterator[Candidate]:
    """Candidates that work with the model and the optimizer. All ranks call this together, because the checks of parts
    may communicate."""
    known: dict[tuple[str, ...], bool] = {}
    for candidate in candidates:
        key = tuple(map(repr, candidate.plan.parts))
        if key not in known:
            try:
                check(candidate.plan, workload.model, workload.optimizer, world)
                known[key] = True
            except StrategyError as error:
                log.info("auto: %s is not possible: %s", candidate.title, error)
                known[key] = False
        if known[key]:
            yield candidate
