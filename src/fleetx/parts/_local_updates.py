"""The base of localsgd and adaptive_localsgd: rounds without communication, and the average that ends a period."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.futures import Future
from torch.optim import Optimizer

from fleetx.base.module_names import sparse_problem
from fleetx.comm.averaging import average, completed
from fleetx.comm.world import World
from fleetx.engine.context import Bucket, StepContext
from fleetx.errors import NOT_BUILT, UsageError
from fleetx.parts._outer_optimizer import Delayed, OuterOptimizer
from fleetx.strategy.compose import Plan
from fleetx.strategy.cost_model import CostTerms
from fleetx.strategy.part import Part, name_of, settings
from fleetx.strategy.stage import Fact, Stage, at


@settings
class LocalUpdates(Part):
    """Each rank updates with its own gradient; `end_period` averages the parameters.

    A subclass decides when a period ends. It lists the settings of its period in a second base class, because
    dataclass fields are ordered from the last base to the first, and these settings come first.
    """

    average_momentum: bool = False
    """Also average the optimizer's per-parameter state, such as momentum."""
    average_buffers: bool = False
    """Average floating-point buffers, such as BatchNorm statistics, instead of copying those of rank 0."""
    overlap: bool = False
    """Average in the background during the next period, and apply the result at its end."""
    overlap_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Fraction of the distance to such an average, which is one period old, that is applied."""
    outer_lr: Annotated[float, Field(gt=0)] = 1.0
    """Learning rate of the outer optimizer."""
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Nesterov momentum of the outer optimizer."""
    allow_single: bool = False
    """Allow a single rank, for debugging."""

    decides: ClassVar[str] = "in which rounds the parameters are averaged"

    def period(self) -> int:
        """Rounds in a period, as far as the cost of communication is concerned."""
        raise NotImplementedError

    def problems(self) -> Iterator[str]:
        if self.overlap and self.average_momentum:
            yield f"overlap with average_momentum {NOT_BUILT}: remove one of them"
        if not self.overlap and self.overlap_share != type(self)().overlap_share:
            yield "overlap_share has no effect without overlap: turn overlap on, or remove it"

    def incompatibilities(self, model: nn.Module, optimizer: Optimizer, world: World) -> Iterator[str]:
        if world.size == 1 and not self.allow_single:
            name = name_of(type(self))
            yield (
                f"{name}: there is only one worker, so there is nothing to communicate: start more with fleetrun, or "
                f"set strategy.{name}_configs['allow_single'] = True for debugging"
            )
        yield from sparse_problem(name_of(type(self)), model)

    def remarks(self, ctx: StepContext | None) -> Iterator[str]:
        if ctx is not None and ctx.replica_group.size == 1:
            yield "no effect here: there is one replica of the model, so there is nothing to average"

    def init(self, params: Mapping[str, nn.Parameter]) -> dict[str, Any]:
        return {"last": 0}  # the round of the last average

    def belongs_to_rank(self, state: Mapping[str, Any]) -> bool:
        return bool(state.get("under_way"))

    def for_other_ranks(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Without the average under way: the ranks are equal already."""
        return {key: value for key, value in states[0].items() if key != "under_way"}

    def keeps(self, params: Iterable[Tensor], plan: Plan) -> int:
        """Copies: the parameters that were sent and their mean, the anchor, the outer momentum."""
        anchored = self._outer or bool(plan.at(Stage.WIRE))
        return (2 * self.overlap + anchored + (self.outer_momentum > 0)) * sum(p.nbytes for p in params)

    def cost(self, terms: CostTerms) -> None:
        terms.reduce_every, terms.after_backward, terms.averages_parameters = self.period(), True, True

    @at(Stage.REDUCE, unbuilt={Fact.PARTED}, makes={Fact.LOCAL})
    def keep(self, bucket: Bucket, ctx: StepContext) -> Future[Tensor]:
        """keep each rank's own gradient: nothing is sent during backward"""
        if (self._outer or ctx.coded) and "anchor" not in ctx.state:
            self._start(ctx)
        self._note_missing(bucket, ctx)
        return completed(bucket.buffer)

    @at(Stage.GRADIENT, needs={Fact.LOCAL})
    def leave_out(self, grads: list[Tensor], ctx: StepContext) -> None:
        """drop the zeros that stand for gradients which only other ranks have, so that nothing decays here"""
        for p in ctx.notes["missing"] if ctx.notes.get("missing_in") == ctx.round else ():
            p.grad = None

    def _note_missing(self, bucket: Bucket, ctx: StepContext) -> None:
        """The reducer fills the gradient of a parameter with zeros if this rank did not use it, but another one did."""
        notes = ctx.notes
        if notes.get("missing_in") != ctx.round:
            notes["missing_in"], notes["missing"] = ctx.round, []
        params = notes.get("params")
        if params is None:
            params = notes["params"] = {name: p for p, name in ctx.names.items()}
        notes["missing"] += [params[name] for name in bucket.names if params[name].grad is None]

    def end_period(self, params: list[Tensor], ctx: StepContext) -> None:
        """Average the parameters, or start to."""
        ctx.state["last"] = ctx.round
        if ctx.network.world.size == 1:
            return
        if self.overlap:
            self._delayed(ctx).turn(params, ctx)
        else:
            self._step.now(params, ctx)
        if self.average_momentum:
            average(_optimizer_state(params, ctx), ctx.network)
        self._sync_buffers(ctx)

    def drain(self, params: list[Tensor], ctx: StepContext, *, last: bool) -> None:
        if last and self.overlap:
            self._delayed(ctx).finish(params, ctx)
            average(params, ctx.network)  # overlapped averages leave the ranks a small distance apart
            if "anchor" in ctx.state:
                self._step.start(ctx)
            self._sync_buffers(ctx)
        elif last and ctx.round > ctx.state["last"]:
            self.end_period(params, ctx)
        elif self.overlap and not last:
            ctx.state["under_way"] = self._delayed(ctx).saved()

    def unfinished(self, ctx: StepContext) -> Iterator[str]:
        rounds = ctx.round - ctx.state["last"]
        if rounds and ctx.replica_group.size > 1:
            yield (
                f"while the ranks have different parameters, because {name_of(type(self))} has not averaged them for "
                f"{rounds} round{'s' if rounds > 1 else ''}"
            )

    def _delayed(self, ctx: StepContext) -> Delayed:
        """The step under way, restored if a checkpoint was loaded since."""
        delayed: Delayed = ctx.notes.setdefault("delayed", Delayed(self._step, ctx.network))
        saved = ctx.state.pop("under_way", None)
        if "delayed" not in ctx.in_progress:
            delayed.load(saved or [])
            ctx.in_progress["delayed"] = delayed
        return delayed

    def _sync_buffers(self, ctx: StepContext) -> None:
        buffers = [b for b in ctx.model.buffers() if b is not None]
        averaged = [b for b in buffers if self.average_buffers and _has_mean(b)]
        if ctx.replica_group.size > 1:
            average(averaged, ctx.network)
            ctx.broadcast_buffers(skip=averaged)

    # --- the outer optimizer ----------------------------------------------------------------------
    @property
    def _outer(self) -> bool:
        return self.outer_lr != 1.0 or self.outer_momentum != 0.0

    @property
    def _step(self) -> OuterOptimizer:
        return OuterOptimizer(self.outer_lr, self.outer_momentum, self.overlap_share if self.overlap else None)

    def _start(self, ctx: StepContext) -> None:
        """Before the first update, while the ranks are still equal."""
        if ctx.round:  # resumed from a checkpoint without an anchor: the ranks may differ
            average(list(ctx.names), ctx.network)
        self._step.start(ctx)


def _has_mean(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _optimizer_state(params: list[Tensor], ctx: StepContext) -> list[Tensor]:
    """The optimizer's floating-point state tensors, such as momentum. Every rank must have equally many values."""
    state = ctx.optimizer.state
    values = [s for p in params for _, s in sorted(state.get(p, {}).items()) if isinstance(s, Tensor)]
    values = [s for s in values if s.dim() and _has_mean(s)]
    count = torch.tensor([sum(s.numel() for s in values)], device=ctx.device)
    counts = ctx.replica_group.gather(count).flatten().tolist()
    if len(set(counts)) > 1:
        raise UsageError(
            f"average_momentum: the ranks' optimizers hold different numbers of values ({counts}), because some "
            "parameters got a gradient on some ranks only: use every parameter on every rank, or turn it off"
        )
    return values
