"""Chooses the segments with which a training step is fastest, within a number of bytes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from torch import nn

from fleetx.base import cache
from fleetx.base.module_names import named, named_modules
from fleetx.base.sizes import format_bytes, parse_bytes
from fleetx.errors import StrategyError, UsageError
from fleetx.measure.block_profile import BlockCost, BlockProfile, profile_blocks
from fleetx.measure.fake_step import (
    AroundForward,
    InstallSegments,
    TrainingStep,
    constants_of,
    estimate,
    shapes_of,
    step_key,
)
from fleetx.parts.recompute.chain import Chain
from fleetx.parts.recompute.offload import Offload
from fleetx.parts.recompute.segments import NamedSegments, PlannedSegments, Tree, blocks_around
from fleetx.parts.recompute.solver import Table

if TYPE_CHECKING:
    from fleetx.engine.context import StepContext

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]
log = logging.getLogger(__name__)
TRIES = 8  # predictions of the step, to find how many bytes the blocks may take
FACTORS = (1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 2.0)  # of the blocks' minimum, to find the step's minimum
ROOM = 1.5  # size of a table relative to the bytes that seem to be free
CLOSE = 0.995  # of the limit: good enough


@dataclass(frozen=True)
class SegmentPlan:
    """`tree` is over the calls of the modules `names`; it is empty if nothing is recomputed."""

    names: list[str]
    in_place: list[str]  # those that modify their inputs
    tree: Tree
    limit: int  # bytes
    plain: int  # peak without recomputation
    peak: int  # predicted
    added: float  # predicted seconds per step
    seconds: float  # of the blocks' forward and backward without recomputation

    def install(self, model: nn.Module, context: AroundForward) -> AroundForward:
        return self.chain(model, context).forward

    def chain(self, model: nn.Module, context: AroundForward, offload: Offload | None = None) -> Chain:
        modules = dict(named_modules(model))
        blocks = {name: modules[name] for name in self.names}
        return Chain(blocks, PlannedSegments(self.names, self.tree), context, offload, self.in_place)

    def __str__(self) -> str:
        if not self.tree:
            return f"nothing is recomputed: {format_bytes(self.plain)} fit into {format_bytes(self.limit)}"
        recomputed = sum(_count(item) for item in self.tree if not isinstance(item, int))
        share = f", {self.added / self.seconds:.0%} of forward and backward" if self.seconds else ""
        return (
            f"{recomputed} of {len(self.names)} blocks are recomputed: {format_bytes(self.peak)} instead of "
            f"{format_bytes(self.plain)}, limit {format_bytes(self.limit)}; adds {1e3 * self.added:.0f} ms per "
            f"step{share}"
        )


def _count(tree: Tree) -> int:
    return sum(1 if isinstance(item, int) else _count(item) for item in tree)


def choose(step: TrainingStep, budget: str | float, *, timed: bool = True) -> SegmentPlan:
    """The fastest plan that fits. Raises StrategyError if none does. timed: see `Planner`."""
    return Planner(step, timed=timed).choose(budget)


class Planner:
    """Plans one step for any number of budgets; the model is profiled once.

    timed: if False, no block runs for real, which is enough for the budget "min".
    """

    def __init__(self, step: TrainingStep, *, timed: bool = True):
        self._step, self._timed = step, timed
        self.plain = estimate(step)
        self._peaks: dict[str, int] = {}  # of trees that were predicted

    def choose(self, budget: str | float) -> SegmentPlan:
        plain = self.plain.peak
        limit = _limit(budget, plain)
        nothing = SegmentPlan([], [], [], limit or plain, plain, plain, 0.0, 0.0)
        if limit is None:
            plan = min((nothing, *self._smallest(None)), key=lambda plan: plan.peak)
        elif plain <= limit:
            return nothing
        else:
            plans = [plan for profile in self._profiles for plan in self._near(profile, limit)]
            if all(plan.peak > limit for plan in plans):
                plans += self._smallest(limit)
            if not (fitting := [plan for plan in plans if plan.peak <= limit]):
                raise StrategyError(self._impossible(limit, min((plan.peak for plan in plans), default=plain)))
            plan = min(fitting, key=lambda plan: plan.added)
        log.info("recompute: %s", plan)
        return plan

    @cached_property
    def _profiles(self) -> list[BlockProfile]:
        return profile_blocks(self._step, timed=self._timed)

    def _table(self, profile: BlockProfile, size: float) -> Table:
        """A table for at most this many bytes. It counts in slots, so one that is far too large would round a lot."""
        saved = sum(block.input_saved + block.saved for block in profile.blocks)
        loss = max(self.plain.activations - saved, 0)  # what exists between forward and backward apart from the blocks
        turn = BlockCost("", 0.0, 0.0, input=0, input_saved=0, saved=0, forward_peak=loss, saving_peak=loss,
                         backward_peak=0)  # fmt: skip
        return Table([*profile.blocks, turn], max(int(size), 1))

    def _near(self, profile: BlockProfile, limit: int) -> Iterator[SegmentPlan]:
        """Plans with more or fewer bytes for the blocks, until the step just fits."""
        free = limit - self.plain.fixed
        table = self._table(profile, ROOM * max(free, 0))
        least = table.least()
        if least is None:
            return
        low, high = least, None  # bytes for the blocks with which the step fits, and with which it does not
        free = max(least, free)
        for _ in range(TRIES):
            plan = self._plan(profile, table, free, limit)
            yield plan
            if limit * CLOSE <= plan.peak <= limit or (plan.peak > limit and free <= least):
                return
            low, high = (free, high) if plan.peak <= limit else (low, free)
            free += limit - plan.peak  # a byte for the blocks is about a byte of the step
            if high is not None and not low < free < high:
                free = (low + high) // 2
            if high is not None and high - low <= table.slot:
                return

    def _smallest(self, limit: int | None) -> Iterator[SegmentPlan]:
        """Plans around the blocks' minimum, because the step's minimum is not exactly there."""
        for profile in self._profiles:
            table = self._table(profile, 2 * self.plain.activations)
            least = table.least()
            while least and ROOM * FACTORS[-1] * least < table.slot * table.slots and table.slot > 1:
                finer = self._table(profile, FACTORS[-1] * least)
                if finer.least() is None:
                    break
                table, least = finer, finer.least()
            if least is not None:
                yield from (self._plan(profile, table, int(least * factor), limit) for factor in FACTORS)

    def _plan(self, profile: BlockProfile, table: Table, free: int, limit: int | None) -> SegmentPlan:
        tree = table.tree(free)[:-1]  # without the turn, which is always kept
        seconds = sum(block.forward + block.backward for block in profile.blocks)
        plan = SegmentPlan(
            profile.names, profile.in_place, tree, 0, self.plain.peak, 0, table.time(free) - seconds, seconds
        )
        key = f"{len(profile.names)} {tree}"
        if key not in self._peaks:
            self._peaks[key] = estimate(self._step, plan.install, plain=self.plain).peak
        return replace(plan, limit=limit or self._peaks[key], peak=self._peaks[key])

    def _impossible(self, limit: int, least: int) -> str:
        return (
            f"recompute_configs['memory_budget']: a step does not fit into {format_bytes(limit)}. The minimum is "
            f"{format_bytes(least)}, of which {format_bytes(self.plain.fixed)} are parameters, optimizer state and "
            "other memory that recomputation cannot reduce: use a smaller micro-batch (with gradient_merge for the "
            "same global batch), an optimizer with less state, or sharding"
        )


def _limit(budget: str | float, plain: int) -> int | None:
    """The budget in bytes. A share is relative to the peak without recomputation; None means the minimum."""
    if budget == "min":
        return None
    if isinstance(budget, float):
        return int(budget * plain)
    return parse_bytes(budget) if isinstance(budget, str) else budget


# --- in training ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class InstalledPlan:
    """A plan that is installed in a model, and the inputs that it was made for."""

    plan: SegmentPlan
    chain: Chain | None
    inputs: Any  # shapes, and everything else that the forward depends on

    def covers(self, model: nn.Module, inputs: CallArguments) -> bool:
        """Are these inputs no larger and otherwise the same, and is the model in the same mode?"""
        (shapes, others), (planned, same) = _about(model, inputs), self.inputs
        return (
            others == same
            and len(shapes) == len(planned)
            and all(a[1:] == b[1:] and _within(a[0], b[0]) for a, b in zip(shapes, planned, strict=True))
        )


def install(budget: str | float, ctx: StepContext, inputs: CallArguments, offload: Offload | None) -> InstalledPlan:
    """Plan for the model, optimizer and strategies of an engine and for these inputs."""
    args, kwargs = inputs
    step = TrainingStep.under(
        ctx.plan, ctx.model, ctx.optimizer, ranks=ctx.replica_group.size, args=args, kwargs=kwargs
    )
    try:
        plan = _cached(step, budget)
    except (StrategyError, UsageError):
        raise
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise StrategyError(
            "recompute_configs['memory_budget']: this model cannot run on tensors without data, so its memory cannot "
            f"be predicted ({type(error).__name__}: {first}): name checkpoints instead"
        ) from error
    chain = plan.chain(ctx.model, ctx.forward, offload) if plan.tree else None
    return InstalledPlan(plan, chain, _about(ctx.model, inputs))


def _cached(step: TrainingStep, budget: str | float) -> SegmentPlan:
    """A stored plan, if it still fits: the code of the model may have changed."""
    name = step_key(step, budget)
    if (stored := cache.load("recompute", name)) is not None:
        try:
            plan = SegmentPlan(**stored)
            if estimate(step, plan.install if plan.tree else None).peak <= max(plan.limit, plan.peak):
                return plan
        except (UsageError, KeyError, TypeError):
            log.info("recompute: the stored plan does not fit this model any more")
    plan = choose(step, budget)
    cache.save("recompute", name, asdict(plan))
    return plan


def _about(model: nn.Module, inputs: CallArguments) -> Any:
    flags = [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]
    return shapes_of(inputs), (constants_of(inputs), *flags)


def _within(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return len(a) == len(b) and all(x <= y for x, y in zip(a, b, strict=True))


# --- for predictions ------------------------------------------------------------------------------
def install_for(part: Any, step: TrainingStep) -> InstallSegments | None:
    """The segments of a recompute part. With memory_budget, those with the lowest peak."""
    if part is None:
        return None
    if part.memory_budget is not None:
        return choose(step, "min", timed=False).install
    return partial(_install_named, part.checkpoints)


def _install_named(patterns: list[str], model: nn.Module, context: AroundForward) -> AroundForward:
    names = named(model, patterns)
    return Chain(blocks_around(model, names), NamedSegments(names), context).forward
