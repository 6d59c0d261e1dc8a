"""The base of localsgd and adaptive_localsgd: rounds without communication, and the average that ends a period."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import Optimizer

from fleetx.base.suggest import either
from fleetx.comm.averaging import average
from fleetx.comm.paths import Network, completed, inside_hosts
from fleetx.comm.world import World
from fleetx.engine.context import Bucket, SetupContext, StepContext
from fleetx.engine.dtensors import local
from fleetx.errors import NOT_BUILT, StrategyError, UsageError
from fleetx.parts._outer_optimizer import Delayed, OuterOptimizer
from fleetx.strategy.compose import Plan
from fleetx.strategy.cost_model import CostTerms
from fleetx.strategy.part import Part, name_of, settings
from fleetx.strategy.stage import Fact, Stage, at


@settings
class LocalUpdates(Part):
    """Each rank updates with its own gradient; `end_period` averages the parameters.

    A subclass decides when a period ends. It declares its own settings in a second base class, because dataclass
    fields are ordered from the last base to the first, and those settings come first.
    """

    average_momentum: bool = False
    """Also average the optimizer's per-parameter state, such as momentum."""
    average_buffers: bool = False
    """Average floating-point buffers, such as BatchNorm statistics, instead of copying those of rank 0."""
    overlap: bool = False
    """Average in the background during the next period, and apply the result at its end."""
    overlap_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """With overlap, the fraction of the distance to the average, which is one period old, that is applied."""
    group_size: Annotated[int, Field(ge=1)] | Literal["host"] = 1
    """Consecutive ranks per island, which update with the mean of their gradients; 'host': one island per host."""
    fragments: Annotated[int, Field(ge=1)] = 1
    """Parts of the model that are averaged in turn, each once per period."""
    outer_lr: Annotated[float, Field(gt=0)] = 1.0
    """Learning rate of the outer optimizer."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Nesterov momentum of the outer optimizer."""
    allow_single: bool = False
    """Allow a single rank, for debugging."""

    dense: ClassVar[bool] = True
    decides: ClassVar[str] = "in which rounds the parameters are averaged"
    own_per_parameter: ClassVar[tuple[str, ...]] = ("anchor", "outer")

    def period(self) -> int:
        """Rounds per period, to estimate the cost of communication."""
        raise NotImplementedError

    def problems(self) -> Iterator[str]:
        if self.overlap and self.average_momentum:
            yield f"overlap with average_momentum {NOT_BUILT}: remove one of them"
        if not self.overlap and self.overlap_share != type(self)().overlap_share:
            yield "overlap_share has no effect without overlap: turn overlap on, or remove it"

    def incompatibilities(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        yield from super().incompatibilities(model, optimizer, world)
        if world.size > 1 and self._has_islands:
            yield from self._misfits(self._island_size(world), world.size)

    def _island_size(self, world: World) -> int:
        return inside_hosts(world.hosts()) if self.group_size == "host" else self.group_size

    def _misfits(self, size: int, ranks: int) -> Iterator[str]:
        where = f"{name_of(type(self))}_configs['group_size']"
        if size == 0:
            why = "not every host has the same number of workers with consecutive ranks"
            yield f"{where} = 'host': {why}: give a number"
        elif ranks % size:
            divisors = either(n for n in range(1, ranks + 1) if ranks % n == 0)
            yield f"{where} = {size} does not divide {ranks} ranks: use {divisors}"

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        if ctx is not None and ctx.network.world.size == 1:
            yield "no effect here: there is one replica of the model, so there is nothing to average"
        elif ctx is not None and ctx.island is not None:
            size, number = ctx.island.size, ctx.network.parties
            yield f"{number} islands of {size} ranks" if number > 1 else f"one island of {size} ranks: data parallelism"

    def init(self, params: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        # last: the round of each fragment's last average. together: the last round in which all were averaged.
        return {"last": [0] * self.fragments, "together": 0}

    def belongs_to_rank(self, state: Mapping[str, Any]) -> bool:
        return bool(state.get("under_way"))

    def for_other_ranks(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Drop the average in progress: the loaded parameters are already equal on all ranks."""
        return {key: value for key, value in states[0].items() if key != "under_way"}

    def keeps(self, params: Iterable[Tensor], plan: Plan) -> int:
        """Bytes of the copies: the parameters that were sent and their mean, the anchor, the outer momentum."""
        anchored = self._outer or bool(plan.at(Stage.WIRE))
        return (2 * self.overlap + anchored + (self.outer_momentum > 0)) * sum(p.nbytes for p in params)

    def cost(self, terms: CostTerms) -> None:
        terms.reduce_every, terms.after_backward, terms.averages_parameters = self.period(), True, True
        terms.island = terms.cluster.ranks_per_host if self.group_size == "host" else self.group_size

    @at(Stage.MODEL, when=lambda self: self._has_islands)
    def make_islands(self, model: nn.Module, ctx: SetupContext) -> nn.Module:
        """group the ranks into islands, each of which updates with its own gradient"""
        if ctx.replica_group.size > 1:
            size = self._island_size(ctx.replica_group)
            if problems := list(self._misfits(size, ctx.replica_group.size)):
                raise StrategyError(problems)
            ctx.notes["inside"] = ctx.make_islands(size)
        return model

    @at(Stage.REDUCE, makes={Fact.LOCAL, Fact.APART}, when=lambda self: not self._has_islands)
    def keep(self, bucket: Bucket, ctx: StepContext) -> Future[Tensor]:
        """keep each rank's own gradient, or that of its group under sharding: nothing is sent to others in backward"""
        self._note_missing(bucket, ctx)
        return completed(bucket.buffer)

    @at(
        Stage.REDUCE,
        unbuilt={Fact.PARTED, Fact.ROUTED},
        makes={Fact.LOCAL, Fact.APART},
        when=lambda self: self._has_islands,
    )
    def share(self, bucket: Bucket, ctx: StepContext) -> Future[Tensor]:
        """average each bucket within the island: nothing is sent between islands during backward"""
        self._note_missing(bucket, ctx)
        inside: Network = ctx.notes["inside"]
        return inside.mean(bucket.buffer, bucket.index)

    @at(Stage.GRADIENT, needs={Fact.LOCAL})
    def keep_anchor(self, grads: list[Tensor], ctx: StepContext) -> None:
        """keep the parameters from before the first update, from which the exchanged distances are counted"""
        # Not in backward, which a rank that leaves out its batch does not run.
        if (self._outer or ctx.coded) and "anchor" not in ctx.state and ctx.network.parties > 1:
            if ctx.round:  # resumed from a checkpoint without an anchor: the ranks may differ
                average(list(map(local, ctx.names)), ctx.network)
            self._step.start(ctx)  # the ranks are still equal

    @at(Stage.GRADIENT, needs={Fact.LOCAL})
    def leave_out(self, grads: list[Tensor], ctx: StepContext) -> None:
        """drop the zero gradients of parameters that only other ranks used, so that nothing decays here"""
        for p in ctx.notes["missing"] if ctx.notes.get("missing_in") == ctx.round else ():
            p.grad = None

    def _note_missing(self, bucket: Bucket, ctx: StepContext) -> None:
        """Note which parameters this rank did not use: if another rank did, the reducer makes their gradient zero."""
        if ctx.reduced:  # FSDP skips parameters that no rank of the group used
            return
        notes = ctx.notes
        if notes.get("missing_in") != ctx.round:
            notes["missing_in"], notes["missing"] = ctx.round, []
        params = notes.get("params")
        if params is None:
            params = notes["params"] = {name: p for p, name in ctx.names.items()}
        used = [params[name].grad is not None for name in bucket.names]
        if ctx.island is not None and ctx.finds_unused:
            flags = torch.tensor(used, dtype=torch.uint8, device=ctx.device)
            ctx.island.maximum(flags)
            used = flags.tolist()
        elif ctx.island is not None:  # only a rank without a batch lacks gradients, and its island has them
            return
        notes["missing"] += [params[name] for name, yes in zip(bucket.names, used, strict=True) if not yes]

    def end_periods(self, params: list[Tensor], ctx: StepContext, begin: int, k: int) -> bool:
        """Average, or start to average, the fragments whose period ends in this round. Was the first one among them?

        After a round in which all were averaged, the first periods are staggered, so that fragments take turns.
        """
        if ctx.round <= begin:
            ctx.state["together"] = ctx.round
        due = []
        for fragment, last in enumerate(self._last(ctx)):
            first = -(-k * (fragment + 1) // self.fragments)
            period = first if last <= ctx.state["together"] else k
            due += [fragment] if ctx.round <= begin or ctx.round - last >= period else []
        self._average(due, params, ctx)
        return 0 in due

    def _last(self, ctx: StepContext) -> list[int]:
        found: list[int] = ctx.state["last"]
        if len(found) != self.fragments:  # the checkpoint had a different number
            ctx.state["last"] = found = [min(found)] * self.fragments
        return found

    def _average(self, due: Sequence[int], params: list[Tensor], ctx: StepContext) -> None:
        divided = _divided(params, self.fragments)
        for fragment in due:
            ctx.state["last"][fragment] = ctx.round
            if ctx.network.parties == 1:
                continue
            if self.overlap:
                self._delayed(ctx)[fragment].turn(divided[fragment], ctx)
            else:
                self._step.now(divided[fragment], ctx)
            if self.average_momentum:
                average(_optimizer_state(divided[fragment], ctx), ctx.network)
        if 0 in due and ctx.network.parties > 1:
            self._sync_buffers(ctx)

    def drain(self, params: list[Tensor], ctx: StepContext, *, last: bool) -> None:
        if last and self.overlap:
            for delayed, fragment in zip(self._delayed(ctx), _divided(params, self.fragments), strict=True):
                delayed.finish(fragment, ctx)
            average(list(map(local, params)), ctx.network)  # overlapped averages leave the ranks a small distance apart
            if "anchor" in ctx.state:
                self._step.start(ctx)
            self._sync_buffers(ctx)
        elif last and ctx.round > min(self._last(ctx)):
            self._average(range(self.fragments), params, ctx)
        elif self.overlap and not last:
            ctx.state["under_way"] = [delayed.saved() for delayed in self._delayed(ctx)]
        if last:
            ctx.state["last"], ctx.state["together"] = [ctx.round] * self.fragments, ctx.round

    def unfinished(self, ctx: StepContext) -> Iterator[str]:
        rounds, switch = ctx.round - min(ctx.state["last"]), name_of(type(self))
        why = f"{switch} has not averaged them for {rounds} round{'s' if rounds > 1 else ''}" if rounds else ""
        if any(each.under_way for each in ctx.notes.get("delayed", ())):
            why = why or f"the last average of {switch} has not been applied"
        if why and ctx.network.world.size > 1:
            yield f"while the ranks have different parameters, because {why}"

    def _delayed(self, ctx: StepContext) -> list[Delayed]:
        """The step in progress of each fragment, restored if a checkpoint has been loaded."""
        if "delayed" not in ctx.notes:
            clone = ctx.network.clone_groups()
            ctx.notes["delayed"] = [Delayed(self._step, clone) for _ in range(self.fragments)]
        found: list[Delayed] = ctx.notes["delayed"]
        saved = ctx.state.pop("under_way", None) or [[] for _ in found]
        if "delayed" not in ctx.in_progress:
            if len(saved) != len(found):
                raise UsageError(
                    f"this checkpoint was saved while {len(saved)} fragments were averaged in the background: set "
                    f"{name_of(type(self))}_configs['fragments'] = {len(saved)}, or call fleet.flush() before saving"
                )
            for delayed, one in zip(found, saved, strict=True):
                delayed.load(one)
            ctx.in_progress["delayed"] = found
        return found

    def _sync_buffers(self, ctx: StepContext) -> None:
        buffers = [b for b in ctx.model.buffers() if b is not None]
        averaged = [b for b in buffers if self.average_buffers and _has_mean(b)]
        if ctx.replica_group.size > 1:
            average(averaged, ctx.network)
            ctx.broadcast_buffers(skip=averaged)

    @property
    def _has_islands(self) -> bool:
        return self.group_size != 1

    # --- the outer optimizer ----------------------------------------------------------------------
    @property
    def _outer(self) -> bool:
        return self.outer_lr != 1.0 or self.outer_momentum != 0.0

    @property
    def _step(self) -> OuterOptimizer:
        return OuterOptimizer(self.outer_lr, self.outer_momentum, self.overlap_share if self.overlap else None)


def _divided(params: list[Tensor], fragments: int) -> list[list[Tensor]]:
    """Consecutive parameters, in fragments of about equal size."""
    out: list[list[Tensor]] = [[] for _ in range(fragments)]
    total, before = sum(p.nbytes for p in params), 0
    for p in params:
        out[min(fragments * (before + p.nbytes // 2) // max(total, 1), fragments - 1)].append(p)
        before += p.nbytes
    return out


def _has_mean(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _optimizer_state(params: list[Tensor], ctx: StepContext) -> list[Tensor]:
    """The optimizer's floating-point state, such as momentum. Every rank must hold the same number of values."""
    state = ctx.optimizer.state
    values = [local(s) for p in params for _, s in sorted(state.get(p, {}).items()) if isinstance(s, Tensor)]
    values = [s for s in values if s.dim() and _has_mean(s)]
    count = torch.tensor([sum(s.numel() for s in values)], device=ctx.device)
    counts = ctx.network.world.gather(count).flatten().tolist()
    if len(set(counts)) > 1:
        raise UsageError(
            f"average_momentum: the ranks' optimizers hold different numbers of values ({counts}), because some "
            "parameters got a gradient on some ranks only: use every parameter on every rank, or turn average_momentum "
            "off"
        )
    return values
