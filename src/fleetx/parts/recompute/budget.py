"""A number of bytes -> the segments with which training takes least time within them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils import _pytree as pytree

from fleetx.base import cache
from fleetx.base.module_names import named, named_modules
from fleetx.base.sizes import parse, words
from fleetx.base.trees import tensors_of
from fleetx.errors import StrategyError, UsageError
from fleetx.measure import step_key
from fleetx.measure.block_profile import Block, Probe, probes
from fleetx.measure.fake_step import Arm, Forward, Step, estimate
from fleetx.parts.recompute.chain import Chain
from fleetx.parts.recompute.offload import Host
from fleetx.parts.recompute.segments import Named, Planned, Tree, around
from fleetx.parts.recompute.solver import Table
from fleetx.strategy.stage import Fact

if TYPE_CHECKING:
    from fleetx.engine.context import StepContext

Shapes = list[tuple[tuple[int, ...], Any, bool]]
log = logging.getLogger(__name__)
TRIES = 8  # predictions of the whole step, to find how many bytes the blocks may have
FACTORS = (1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 2.0)  # of the least bytes for the blocks, to find the least of the step
ROOM = 1.5  # of the bytes that seem to be free: how many a table is made for
CLOSE = 0.995  # of the bytes that are allowed: near enough


@dataclass(frozen=True)
class Choice:
    """`tree` over the calls of the modules `names`. Without segments it is empty."""

    names: list[str]
    writes: list[str]  # those that change what they are given in place
    tree: Tree
    limit: int  # bytes
    plain: int  # the peak without recomputation
    peak: int  # as predicted
    added: float  # seconds a step, as predicted
    whole: float  # seconds of forward and backward without recomputation, of the blocks

    def arm(self, model: nn.Module, context: Forward) -> Forward:
        return self.chain(model, context).forward

    def chain(self, model: nn.Module, context: Forward, host: Host | None = None) -> Chain:
        modules = dict(named_modules(model))
        blocks = {name: modules[name] for name in self.names}
        return Chain(blocks, Planned(self.names, self.tree), context, host, self.writes)

    def words(self) -> str:
        if not self.tree:
            return f"nothing is run again: {words(self.plain)} are within {words(self.limit)}"
        share = f", {self.added / self.whole:.0%} of forward and backward" if self.whole else ""
        return (
            f"{_again(self.tree)} of {len(self.names)} blocks are run again: {words(self.peak)} instead of "
            f"{words(self.plain)}, {words(self.limit)} allowed; {1e3 * self.added:.0f} ms more a step{share}"
        )


def bytes_allowed(budget: str | float, plain: int) -> int | None:
    """None: as few as can be. A share is one of what a step without recomputation takes."""
    if budget == "min":
        return None
    if isinstance(budget, float):
        return int(budget * plain)
    return parse(budget) if isinstance(budget, str) else budget


def choose(step: Step, budget: str | float) -> Choice:
    """Raises StrategyError where it cannot be done."""
    return Planner(step).choose(budget)


def least(step: Step) -> Choice:
    """The one with the fewest bytes, found without running anything."""
    return Planner(step, timed=False).choose("min")


class Planner:
    """For one step, with any number of budgets: the model is probed once."""

    def __init__(self, step: Step, *, timed: bool = True):
        self._step, self._timed = step, timed
        self.plain = estimate(step)
        self._peaks: dict[str, int] = {}  # of trees that were predicted

    def choose(self, budget: str | float) -> Choice:
        plain = self.plain.peak
        limit = bytes_allowed(budget, plain)
        nothing = Choice([], [], [], limit or plain, plain, plain, 0.0, 0.0)
        if limit is not None and plain <= limit:
            return nothing
        found: list[Choice] = []
        if limit is not None:
            top = ROOM * max(limit - self.plain.fixed, 0)
            found = [choice for probe in self._probes for choice in self._tried(probe, self._table(probe, top), limit)]
        fitting = [choice for choice in found if limit is not None and choice.peak <= limit]
        if not fitting:
            found += [choice for probe in self._probes for choice in self._fewest(probe, limit)]
            fitting = [choice for choice in found if limit is None or choice.peak <= limit]
        if limit is not None and not fitting:
            raise StrategyError(self._impossible(limit, min((choice.peak for choice in found), default=plain)))
        if limit is None:
            chosen = min((nothing, *found), key=lambda choice: choice.peak)
        else:
            chosen = min(fitting, key=lambda choice: choice.added)
        log.info("recompute: %s", chosen.words())
        return chosen

    @cached_property
    def _probes(self) -> list[Probe]:
        return probes(self._step, timed=self._timed)

    def _table(self, probe: Probe, top: float) -> Table:
        """For so many bytes at most. It counts them in steps, so a table for many more would round everything up."""
        kept = sum(block.takes + block.saved for block in probe.blocks)
        behind = max(self.plain.activations - kept, 0)  # besides, between forward and backward: the loss
        turn = Block("", 0.0, 0.0, input=0, takes=0, saved=0, passing=behind, keeping=behind, undoing=0)
        return Table([*probe.blocks, turn], max(int(top), 1))

    def _tried(self, probe: Probe, table: Table, limit: int) -> Iterator[Choice]:
        """Trees with more, or with fewer, bytes for the blocks, until the whole step fits just so."""
        least = table.least()
        if least is None:
            return
        low, high = least, None  # bytes for the blocks with which the step fits, and with which it does not
        free = max(least, limit - self.plain.fixed)
        for _ in range(TRIES):
            choice = self._choice(probe, table, free, limit)
            yield choice
            if limit * CLOSE <= choice.peak <= limit or (choice.peak > limit and free <= least):
                return
            low, high = (free, high) if choice.peak <= limit else (low, free)
            free += limit - choice.peak  # bytes for the blocks are bytes of the step, more or less
            if high is not None and not low < free < high:
                free = (low + high) // 2
            if high is not None and high - low <= table.slot:
                return

    def _fewest(self, probe: Probe, limit: int | None) -> Iterator[Choice]:
        """What the blocks need least is not quite what the step does: look around it."""
        table = self._table(probe, 2 * self.plain.activations)
        least = table.least()
        while least and ROOM * FACTORS[-1] * least < table.slot * table.slots and table.slot > 1:
            finer = self._table(probe, FACTORS[-1] * least)
            if finer.least() is None:
                break
            table, least = finer, finer.least()
        for factor in FACTORS if least is not None else ():
            assert least is not None
            yield self._choice(probe, table, int(least * factor), limit)

    def _choice(self, probe: Probe, table: Table, free: int, limit: int | None) -> Choice:
        tree = table.tree(free)[:-1]  # without the turn, which is kept always
        whole = sum(block.forward + block.backward for block in probe.blocks)
        made = Choice(probe.names, probe.writes, tree, 0, self.plain.peak, 0, table.time(free) - whole, whole)
        key = f"{len(probe.names)} {tree}"
        if key not in self._peaks:
            self._peaks[key] = estimate(self._step, made.arm).peak
        return replace(made, limit=limit or self._peaks[key], peak=self._peaks[key])

    def _impossible(self, limit: int, least: int) -> str:
        return (
            f"recompute_configs['memory_budget']: {words(limit)} cannot be met. The least is {words(least)}, of which "
            f"{words(self.plain.fixed)} are parameters, optimizer state and the like, whatever is recomputed. A "
            "smaller micro-batch (with gradient_merge for the same global batch), an optimizer that gathers less, or "
            "sharding helps"
        )


@dataclass(frozen=True)
class Plan:
    """A choice, put into a model, and what it was made for."""

    choice: Choice
    chain: Chain | None
    shapes: Shapes
    others: Any

    def covers(self, model: nn.Module, args: Any, kwargs: Any) -> bool:
        """Are these inputs of the same kind, and no larger? And is the model as it was, in training or not?"""
        here = _shapes(args, kwargs)
        return (
            _others(model, args, kwargs) == self.others
            and len(here) == len(self.shapes)
            and all(a[1:] == b[1:] and _within(a[0], b[0]) for a, b in zip(here, self.shapes, strict=True))
        )


def planned(budget: str | float, ctx: StepContext, args: Any, kwargs: Any, host: Host | None) -> Plan:
    """Plan for the model, the optimizer and the strategies of an engine, and these inputs."""
    made = frozenset().union(*(act.claim.makes for act in ctx.plan.acts))
    merged, scaled = Fact.SUMMED in made, Fact.SCALED in made
    apart = buckets(ctx.model) if merged and ctx.replica_group.size > 1 else 0
    step = Step(
        ctx.model,
        ctx.optimizer,
        args,
        kwargs,
        parts=[part for part in ctx.plan.parts if part.changes_forward],
        kept_gradients=merged or ctx.replica_group.size > 1,
        beside=sum(part.keeps(ctx.names, scaled=scaled) for part in ctx.plan.parts) + apart,
    )
    try:
        choice = _stored(step, budget)
    except (StrategyError, UsageError):
        raise
    except Exception as error:
        raise StrategyError(
            "recompute_configs['memory_budget']: this model cannot be run on tensors without data, so its step cannot "
            f"be predicted ({type(error).__name__}: {str(error).partition(chr(10))[0]}). Name checkpoints instead"
        ) from error
    chain = choice.chain(ctx.model, ctx.forward, host) if choice.tree else None
    return Plan(choice, chain, _shapes(args, kwargs), _others(ctx.model, args, kwargs))


def buckets(model: nn.Module) -> int:
    """Bytes in which DDP reduces: steps that are merged without it have gradients of their own beside them."""
    return sum(p.nbytes for p in model.parameters() if p.requires_grad)


def _stored(step: Step, budget: str | float) -> Choice:
    """One that was made before, if it still holds: the code of the model may be another."""
    name = step_key.key(step, budget)
    if (known := cache.load("recompute", name)) is not None:
        try:
            choice = Choice(**known)
            if estimate(step, choice.arm if choice.tree else None).peak <= max(choice.limit, choice.peak):
                return choice
        except (UsageError, KeyError, TypeError):
            log.info("recompute: what was stored for this model does not fit it any more")
    choice = choose(step, budget)
    cache.save("recompute", name, asdict(choice))
    return choice


def _shapes(args: Any, kwargs: Any) -> Shapes:
    return [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors_of((args, kwargs))]


def _within(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return len(a) == len(b) and all(x <= y for x, y in zip(a, b, strict=True))


def _others(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """What else the way through a model depends on."""
    values = [repr(leaf) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, int | float | str | None)]
    return values, [m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]


def arm_of(part: Any, step: Step) -> Arm | None:
    """The segments of a recompute part, for a step that is predicted; of a budget, those with the fewest bytes."""
    if part is None:
        return None
    if part.memory_budget is not None:
        return least(step).arm
    return partial(_arm_named, part.checkpoints)


def _arm_named(patterns: list[str], model: nn.Module, context: Forward) -> Forward:
    names = named(model, patterns)
    return Chain(around(model, names), Named(names), context).forward


def _again(tree: Tree) -> int:
    return sum(0 if isinstance(item, int) else len(list(_numbers(item))) for item in tree)


def _numbers(tree: Tree) -> Iterator[int]:
    for item in tree:
        yield from [item] if isinstance(item, int) else _numbers(item)
